"""Rows that are sums of several others.

In: rows, and for each result the places of the rows it is made of. Out: the sums, taken in float32 in the order of the
places, so that they are the same every time.

Shape legend: R rows given, T sums, W elements of a row.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl


def row_sums(rows: torch.Tensor, starts: torch.Tensor, places_R: torch.Tensor) -> torch.Tensor:
    """[T, ...] of dense [R, ...]; sum t is over ``places_R`` from ``starts[t]`` to ``starts[t + 1]`` (int32)."""
    assert rows.is_contiguous()
    out = rows.new_empty((len(starts) - 1, *rows.shape[1:]))
    width = rows[0].numel()
    if len(out):
        padded = triton.next_power_of_2(width)
        num_warps = max(1, min(8, padded // 256))
        _row_sums[(len(out),)](rows, starts, places_R, out, W=width, W_PAD=padded, num_warps=num_warps)
    return out


@triton.jit
def _row_sums(rows, starts, places, out, W: tl.constexpr, W_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    within_W = tl.arange(0, W_PAD)
    total_W = tl.zeros((W_PAD,), dtype=tl.float32)
    for at in range(tl.load(starts + row), tl.load(starts + row + 1)):
        place = tl.load(places + at).to(tl.int64)
        total_W += tl.load(rows + place * W + within_W, mask=within_W < W, other=0.0).to(tl.float32)
    tl.store(out + row * W + within_W, total_W.to(out.dtype.element_ty), mask=within_W < W)
