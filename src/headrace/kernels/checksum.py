"""Sums of a bundle's words by chunk, taken while it is copied together or where it lies.

In: where each tensor begins in the payload and how many bytes it has. Out: int64 sums, one a chunk of a tensor; equal
bytes have equal sums either way. Every byte is read once and nothing else is held: ``torch.sum`` would first make an
int64 copy of all it adds up, twice the size of a model's weights.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

WIDE_BYTES = 16
"""What a thread moves at a time: offsets, and sizes and addresses of what is copied, are multiples of it."""
_CHUNK_WORDS = 1 << 18
_TILE = 4096


class Chunks:
    """The tensors of a bundle as runs of at most a mebibyte."""

    def __init__(self, extents: Sequence[tuple[int, int]], device: torch.device) -> None:
        """``extents``: offset and bytes of every tensor. Sizes are rounded up, into the gap behind a tensor."""
        rounded = [(offset // 4, -(-size // WIDE_BYTES) * WIDE_BYTES // 4) for offset, size in extents]
        words = np.array(rounded, dtype=np.int64).reshape(-1, 2)
        tensor, start, count = in_chunks(words[:, 1])
        table = np.stack((tensor, start, words[tensor, 0] + start, count), axis=1)
        self._table = torch.from_numpy(table).to(device)

    def sums(self, payload: torch.Tensor) -> torch.Tensor:
        """Of the payload (uint8) as it is."""
        return self._run(self._table, payload, copy=False)

    def copied_sums(self, sources: Sequence[torch.Tensor], payload: torch.Tensor) -> torch.Tensor:
        """Of the sources' bytes, which are written into the payload on the way."""
        addresses = torch.tensor([source.data_ptr() for source in sources]).to(payload.device)
        return self._run(addresses, payload, copy=True)

    def _run(self, addresses: torch.Tensor, payload: torch.Tensor, *, copy: bool) -> torch.Tensor:
        sums = torch.empty(len(self._table), dtype=torch.int64, device=payload.device)
        if len(sums):
            words = payload.view(torch.int32)
            _sum_chunk[(len(sums),)](addresses, self._table, words, sums, COPY=copy, TILE=_TILE, num_warps=8)
        return sums


def in_chunks(words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tensors of so many words as chunks: the number of the tensor, where in it the chunk starts, and its words."""
    parts = -(-words // _CHUNK_WORDS)
    tensor = np.repeat(np.arange(len(words)), parts)
    start = (np.arange(len(tensor)) - np.repeat(np.cumsum(parts) - parts, parts)) * _CHUNK_WORDS
    return tensor, start, np.minimum(words[tensor] - start, _CHUNK_WORDS)


@triton.jit
def _sum_chunk(addresses, table, payload, sums, COPY: tl.constexpr, TILE: tl.constexpr):
    chunk = tl.program_id(0)
    entry = table + chunk.to(tl.int64) * 4
    # Multiples of four words, which lets a thread move 16 bytes at a time.
    target = payload + tl.multiple_of(tl.load(entry + 2), 4)
    count = tl.multiple_of(tl.load(entry + 3), 4)
    source = target
    if COPY:
        address = tl.load(addresses + tl.load(entry)).to(tl.pointer_type(tl.int32))
        source = tl.multiple_of(address, 16) + tl.multiple_of(tl.load(entry + 1), 4)
    total = tl.zeros((TILE,), dtype=tl.int64)
    for first in range(0, count, TILE):
        places = first + tl.arange(0, TILE)
        words = tl.load(source + places, mask=places < count, other=0)
        if COPY:
            tl.store(target + places, words, mask=places < count)
        total += words.to(tl.int64)
    tl.store(sums + chunk, tl.sum(total, axis=0))
