"""Whole tensors copied over those of a model, in one launch.

In: the tensors that are written over again and again, then sources of the same sizes. Out: the sources' bytes in them.
The host lists addresses and launches once; seeing every source as what it stands for and copying it costs some ten
microseconds a tensor, which the next forward pass of an engine would wait for.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from headrace.kernels.checksum import WIDE_BYTES, in_chunks

_TILE = 4096


def can_be_copied_wide(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel takes them, as sources or as targets."""
    return all(
        tensor.is_contiguous() and tensor.data_ptr() % WIDE_BYTES == tensor.nbytes % WIDE_BYTES == 0
        for tensor in tensors
    )


class WholeCopies:
    """Tensors that stay where they are."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        """Each ``can_be_copied_wide``; there is at least one."""
        device = targets[0].device
        chunks = in_chunks(np.array([target.nbytes // 4 for target in targets], dtype=np.int64))
        self._table = torch.from_numpy(np.stack(chunks, axis=1)).to(device)
        self._targets = torch.tensor([target.data_ptr() for target in targets]).to(device)

    def copy_from(self, sources: Sequence[torch.Tensor]) -> None:
        """In the order of the targets and as many bytes each. Nothing here waits for the device."""
        addresses = torch.tensor([source.data_ptr() for source in sources])
        addresses = addresses.to(self._table.device, non_blocking=True)
        _copy_chunk[(len(self._table),)](addresses, self._targets, self._table, TILE=_TILE, num_warps=8)


@triton.jit
def _copy_chunk(sources, targets, table, TILE: tl.constexpr):
    entry = table + tl.program_id(0).to(tl.int64) * 3
    tensor = tl.load(entry)
    # Multiples of four words, which lets a thread move 16 bytes at a time.
    start = tl.multiple_of(tl.load(entry + 1), 4)
    count = tl.multiple_of(tl.load(entry + 2), 4)
    source = tl.multiple_of(tl.load(sources + tensor).to(tl.pointer_type(tl.int32)), 16) + start
    target = tl.multiple_of(tl.load(targets + tensor).to(tl.pointer_type(tl.int32)), 16) + start
    for first in range(0, count, TILE):
        places = first + tl.arange(0, TILE)
        tl.store(target + places, tl.load(source + places, mask=places < count), mask=places < count)
