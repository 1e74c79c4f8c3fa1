"""A product of a few rows that is added to a running sum where it lies.

In: rows and weights, and the float32 sum. Out: the sum is changed. A few rows are bound by the way of the weights
through memory, so the weights are the left operand, whose tiles may not be narrower than 64, and the chip is filled by
splitting inputs: programs leave what they summed, and whichever is last with a tile adds all of it, in one order.
Hopper alone; others have not been tried.

Shape legend: T rows, I inputs, O outputs; M rows and N outputs of a tile, K inputs at a time.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.chip import ALIGNED, ALIGNED_BYTES, HOPPER, chip
from headrace.kernels.states import is_last
from headrace.kernels.tiled_matrix import in_tiles

MOST_TILES = 512
"""Of outputs; so many counters serve every product."""
_MOST_ROWS, _MOST_ROWS_LARGE = 32, 64
"""Of any weights, and of large ones."""
_LARGE_NUMEL = 2**25
_LEAST_OUTPUTS = 2048
"""Below, torch's product is quicker."""
_OUTPUTS, _INPUTS = 64, 128
"""Of a tile."""
_NUM_WARPS, _NUM_STAGES = 4, 6
_LEAST_STEPS = 2
"""Of a program; fewer are not worth its own."""


def is_quick(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether ``add_product`` takes them, and is quicker than torch (docs/kernels.md)."""
    most_rows = _MOST_ROWS if weight_OI.numel() < _LARGE_NUMEL else _MOST_ROWS_LARGE
    return (
        chip(x_TI.device).generation == HOPPER
        and x_TI.dtype == weight_OI.dtype == torch.bfloat16
        and 0 < x_TI.shape[0] <= most_rows
        and x_TI.shape[1] % ALIGNED == 0
        and x_TI.data_ptr() % ALIGNED_BYTES == weight_OI.data_ptr() % ALIGNED_BYTES == 0
        and _LEAST_OUTPUTS <= weight_OI.shape[0] <= MOST_TILES * _OUTPUTS
        and weight_OI.is_contiguous()
    )


def add_product(
    total_TO: torch.Tensor, x_TI: torch.Tensor, weight_OI: torch.Tensor, arrived: torch.Tensor
) -> None:
    """All dense. ``arrived``: int32 [MOST_TILES], zeros, as it is again afterwards; of one stream alone."""
    assert all(matrix.is_contiguous() for matrix in (total_TO, x_TI, weight_OI))
    (num_rows, num_inputs), num_outputs = x_TI.shape, weight_OI.shape[0]
    rows = max(16, triton.next_power_of_2(num_rows))
    num_tiles, num_steps = triton.cdiv(num_outputs, _OUTPUTS), triton.cdiv(num_inputs, _INPUTS)
    num_parts = parts_to_fill(num_tiles, num_steps, chip(x_TI.device).num_multiprocessors)
    sums = total_TO.new_empty(num_tiles * num_parts * rows * _OUTPUTS)
    _add_product[(num_tiles, num_parts)](
        in_tiles(x_TI, rows, _INPUTS), in_tiles(weight_OI, _OUTPUTS, _INPUTS), total_TO, sums, arrived,
        num_rows, num_outputs, num_steps, PARTS=num_parts, M=rows, N=_OUTPUTS, K=_INPUTS,
        num_warps=_NUM_WARPS, num_stages=_NUM_STAGES,
    )  # fmt: skip


def parts_to_fill(num_tiles: int, num_steps: int, num_multiprocessors: int) -> int:
    """Into how many the inputs of a tile are split: all programs run at once, and none has too little to do."""
    return max(1, min(num_multiprocessors // num_tiles, num_steps // _LEAST_STEPS))


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def _add_product(
    x, weight, total, sums, arrived, num_rows, num_outputs, num_steps,
    PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """``x`` and ``weight`` hand out tiles, zeros beyond their edges."""
    tile, part = tl.program_id(0), tl.program_id(1)
    sum_NM = tl.zeros([N, M], tl.float32)
    for step in range(part * num_steps // PARTS, (part + 1) * num_steps // PARTS):
        weight_NK = weight.load([tile * N, step * K])
        sum_NM = tl.dot(weight_NK, x.load([0, step * K]).T, sum_NM)
    if PARTS > 1:
        place_NM = sums + tile * PARTS * (N * M) + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
        tl.store(place_NM + part * (N * M), sum_NM)
        if not is_last(arrived + tile, PARTS):
            return
        sum_NM = tl.zeros([N, M], tl.float32)
        for other in tl.static_range(PARTS):
            # Past the cache that only this multiprocessor sees.
            sum_NM += tl.load(place_NM + other * (N * M), cache_modifier=".cg")
    row_M1, output_1N = tl.arange(0, M)[:, None], (tile * N + tl.arange(0, N))[None, :]
    there_MN = (row_M1 < num_rows) & (output_1N < num_outputs)
    at_MN = total + row_M1 * num_outputs + output_1N
    tl.store(at_MN, tl.load(at_MN, mask=there_MN, other=0.0) + tl.trans(sum_NM), mask=there_MN)
