"""Sums of a long run of words by chunk, read once and nothing else held.

In: int32 words. Out: int64 sums, one a chunk; the last may be of a shorter one. ``torch.sum`` gives the same, but
first makes an int64 copy of all it adds up: twice the size of a model's weights.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096


def chunk_sums(words: torch.Tensor, chunk_words: int) -> torch.Tensor:
    """int64 [chunks]; ``chunk_words`` is a multiple of 4096."""
    num_chunks = triton.cdiv(len(words), chunk_words)
    sums = torch.empty(num_chunks, dtype=torch.int64, device=words.device)
    if num_chunks:
        _sum_chunk[(num_chunks,)](words, sums, len(words), CHUNK=chunk_words, TILE=_TILE, num_warps=8)
    return sums


@triton.jit
def _sum_chunk(words, sums, num_words, CHUNK: tl.constexpr, TILE: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    places = chunk * CHUNK + tl.arange(0, TILE)
    total = tl.zeros((TILE,), dtype=tl.int64)
    for _ in range(0, CHUNK, TILE):
        total += tl.load(words + places, mask=places < num_words, other=0).to(tl.int64)
        places += TILE
    tl.store(sums + chunk, tl.sum(total, axis=0))
