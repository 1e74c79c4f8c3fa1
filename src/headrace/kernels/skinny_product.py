"""The product of few rows and a large matrix at the memory's speed, in float32, as one launch a CUDA graph can hold.

In: some rows and a matrix of one narrow dtype, and a workspace. Out: their product as it was summed, in float32.
With few rows the matrix's way through memory is all that counts, so that as many programs read it as fill the chip:
program (tile n, part k) multiplies a part of the inputs with a tile of the outputs and leaves its sum in the
workspace. The last program to arrive at a tile adds all parts, in their order: the result does not depend on
which of them that was. It also leaves the tile's count at zero, as it found it.

A workspace serves one launch at a time, so the launches that share one belong to one stream.

Shape legend: T rows (padded to a power of two in the kernel), I inputs, O outputs, N outputs of a tile, K inputs
of a step.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_MOST_ROWS = 128
_MOST_PROGRAMS = 4
_MOST_SUMS = 1 << 14
"""Of a multiprocessor's programs."""
_CAPABILITIES = (9, 10)
"""Of GPUs whose multiprocessors have the shared memory that the tilings below count on, 227 KiB."""
_USUAL_MULTIPROCESSORS = 8
"""Where there is no GPU to ask."""


class Tiling(NamedTuple):
    """How a product is cut up."""

    outputs: int
    """N."""
    inputs: int
    """K."""
    programs: int
    """Wanted on each multiprocessor."""
    num_warps: int
    num_stages: int


_WIDE_TILINGS = {
    16: Tiling(outputs=128, inputs=64, programs=2, num_warps=4, num_stages=6),
    32: Tiling(outputs=128, inputs=64, programs=2, num_warps=4, num_stages=5),
    64: Tiling(outputs=128, inputs=64, programs=2, num_warps=4, num_stages=4),
    128: Tiling(outputs=128, inputs=64, programs=1, num_warps=8, num_stages=6),
}
_NARROW_TILINGS = {
    16: Tiling(outputs=64, inputs=64, programs=2, num_warps=4, num_stages=8),
    32: Tiling(outputs=64, inputs=64, programs=2, num_warps=4, num_stages=8),
    64: Tiling(outputs=64, inputs=64, programs=2, num_warps=4, num_stages=6),
    128: Tiling(outputs=64, inputs=64, programs=1, num_warps=4, num_stages=8),
}
"""By padded rows. About 64 KiB a multiprocessor must be on their way for the memory to be busy. Wide tiles read the
rows less often; narrow ones leave fewer sums for the last program to add."""
_ENOUGH_OUTPUTS = 3072
"""For wide tiles: with fewer, a tile would have too many parts."""


@dataclass(frozen=True, slots=True)
class ProductWorkspace:
    """Where programs leave their parts of a product."""

    num_multiprocessors: int
    sums: torch.Tensor
    arrived: torch.Tensor
    """int32: programs that have left a part at each tile; zero between launches."""


def runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in _CAPABILITIES


def product_workspace(device: torch.device) -> ProductWorkspace:
    count = _USUAL_MULTIPROCESSORS
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    return ProductWorkspace(
        num_multiprocessors=count,
        sums=torch.empty(count * _MOST_SUMS, dtype=torch.float32, device=device),
        arrived=torch.zeros(count * _MOST_PROGRAMS, dtype=torch.int32, device=device),
    )


def usual_tiling(num_rows: int, num_out: int) -> Tiling | None:
    """How a product of so many rows and outputs is cut up; None: there are too many rows for this kernel, or none."""
    if not 1 <= num_rows <= _MOST_ROWS:
        return None
    tilings = _WIDE_TILINGS if num_out >= _ENOUGH_OUTPUTS else _NARROW_TILINGS
    return tilings[_padded(num_rows)]


def skinny_product(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, tiling: Tiling, workspace: ProductWorkspace
) -> torch.Tensor:
    """float32 [T, O]. Rows and matrix have one dtype, and their inputs lie side by side."""
    (num_rows, num_in), num_out = x_TI.shape, weight_OI.shape[0]
    assert weight_OI.shape[1] == num_in and weight_OI.is_contiguous() and x_TI.stride(1) == 1
    num_tiles, num_parts = tiles_and_parts(num_out, num_in, tiling, workspace.num_multiprocessors)
    rows = _padded(num_rows)
    # What has several parts has no more programs than are wanted, so that the tiling alone tells how much they leave.
    fits = tiling.programs <= _MOST_PROGRAMS and tiling.programs * tiling.outputs * rows <= _MOST_SUMS
    assert fits, f"a workspace has no room for {tiling} and {num_rows} rows"
    out_TO = torch.empty((num_rows, num_out), dtype=torch.float32, device=x_TI.device)
    _product[(num_tiles, num_parts)](
        x_TI,
        weight_OI,
        out_TO,
        workspace.sums,
        workspace.arrived,
        num_rows,
        num_in,
        num_out,
        x_TI.stride(0),
        T=rows,
        N=tiling.outputs,
        K=tiling.inputs,
        PARTS=num_parts,
        WHOLE=num_in % tiling.inputs == 0,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out_TO


def tiles_and_parts(num_out: int, num_in: int, tiling: Tiling, num_multiprocessors: int) -> tuple[int, int]:
    """Tiles of the outputs, and parts of the inputs: as many as fill the chip once, each of one step at least."""
    num_tiles = triton.cdiv(num_out, tiling.outputs)
    wanted = num_multiprocessors * tiling.programs // num_tiles
    return num_tiles, max(1, min(wanted, triton.cdiv(num_in, tiling.inputs)))


def _padded(num_rows: int) -> int:
    return max(16, triton.next_power_of_2(num_rows))


# A number of rows that is a multiple of sixteen would otherwise be a kernel of its own.
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x,
    weight,
    out,
    sums,
    arrived,
    num_rows,
    num_in,
    num_out,
    stride_t,
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    rows_T, lanes_K = tl.arange(0, T), tl.arange(0, K)
    outputs_N = tile * N + tl.arange(0, N)
    num_steps = tl.cdiv(num_in, K)
    # Behind the last output it is read once more: what comes of it is not written.
    read_N = tl.minimum(outputs_N, num_out - 1).to(tl.int64)
    weight_at = weight + read_N[:, None] * num_in + lanes_K[None, :]
    x_at = x + rows_T[:, None] * stride_t + lanes_K[None, :]
    given_T = rows_T < num_rows
    sum_NT = tl.zeros([N, T], tl.float32)
    for step in range(part * num_steps // PARTS, (part + 1) * num_steps // PARTS):
        first = step * K
        if WHOLE:
            weight_NK = tl.load(weight_at + first, eviction_policy="evict_first")
            x_TK = tl.load(x_at + first, mask=given_T[:, None], other=0.0)
        else:
            inside_K = lanes_K < num_in - first
            weight_NK = tl.load(
                weight_at + first, mask=inside_K[None, :], other=0.0, eviction_policy="evict_first"
            )
            x_TK = tl.load(x_at + first, mask=given_T[:, None] & inside_K[None, :], other=0.0)
        # The matrix's side of a tile is the longer one, which suits the tensor cores.
        sum_NT = tl.dot(weight_NK, tl.trans(x_TK), sum_NT)

    sum_TN = tl.trans(sum_NT)
    out_at = out + rows_T[:, None] * num_out + outputs_N[None, :]
    written_TN = given_T[:, None] & (outputs_N < num_out)[None, :]
    if PARTS == 1:
        tl.store(out_at, sum_TN, mask=written_TN)
    else:
        place_TN = rows_T[:, None] * N + tl.arange(0, N)[None, :]
        tile_sums = sums + tile * (PARTS * T * N) + place_TN
        tl.store(tile_sums + part * (T * N), sum_TN, mask=written_TN, cache_modifier=".cg")
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1:
            total_TN = tl.zeros([T, N], tl.float32)
            for other in tl.static_range(PARTS):
                total_TN += tl.load(tile_sums + other * (T * N), mask=written_TN, cache_modifier=".cg")
            tl.store(out_at, total_TN, mask=written_TN)
            tl.store(arrived + tile, 0)
