"""A sum that a tensor of another dtype is added to, at the memory's speed.

In: a dense sum and a dense term of as many elements. Out: the sum with the term added in the sum's dtype, in place;
the bits are those of torch's ``+=``, whose ready-made addition of two dtypes runs at half that speed.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096


def add_to(total: torch.Tensor, term: torch.Tensor) -> None:
    assert total.is_contiguous() and term.is_contiguous() and total.shape == term.shape
    if total.numel():
        _add[(triton.cdiv(total.numel(), _TILE),)](total, term, total.numel(), TILE=_TILE, num_warps=8)


@triton.jit
def _add(total, term, numel, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = places < numel
    added = tl.load(total + places, mask=inside) + tl.load(term + places, mask=inside).to(
        total.dtype.element_ty
    )
    tl.store(total + places, added, mask=inside)
