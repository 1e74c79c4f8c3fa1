"""Host memory that a GPU copies from and to by itself, taken in large blocks.

In: shapes, one after the other. Out: tensors of them. A tensor that is pinned by itself takes the next power of two of
bytes, which for the moments of a 7B model is 116 GB instead of 61; so blocks are powers of two, and tensors lie in the
first one that has room for them. What was let go of is not handed out again; a block is given back with the last of its
tensors, once it is full or forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

MOST_BLOCK_BYTES = 2**31
"""Blocks are no larger than that, unless one tensor is; the first ones are about as large as what there is already."""
_ALIGNMENT_BYTES = 512


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class HostMemory:
    def __init__(self, new_block: Callable[[int], torch.Tensor] = _pinned) -> None:
        """``new_block``: uint8 of so many bytes."""
        self._new_block = new_block
        self._open: list[torch.Tensor] = []
        """What is left of each block."""
        self._num_used_bytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Whatever is in it."""
        numel = torch.Size(shape).numel()
        needed = -(-numel * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        index = next((i for i, rest in enumerate(self._open) if len(rest) >= needed), None)
        if index is None:
            index = len(self._open)
            self._open.append(self._block(needed))
        self._num_used_bytes += needed
        place, rest = self._open[index].split([needed, len(self._open[index]) - needed])
        if len(rest):
            self._open[index] = rest
        else:
            del self._open[index]
        return place[: numel * dtype.itemsize].view(dtype).view(tuple(shape))

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.take(tensor.shape, tensor.dtype).copy_(tensor)

    def forget(self) -> None:
        """What is left of the blocks there are: all that lies in them is about to be let go of."""
        self._open.clear()
        self._num_used_bytes = 0

    def _block(self, least_bytes: int) -> torch.Tensor:
        wanted = max(least_bytes, min(self._num_used_bytes, MOST_BLOCK_BYTES), 1)
        return self._new_block(1 << (wanted - 1).bit_length())
