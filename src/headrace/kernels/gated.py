"""A gated layer's first two products and what is made of them, at the speed of either memory or arithmetic.

In: rows, and the weights of the gate and of what it lets through. Out: silu(gate) * up, taken of the products as they
were summed: neither is rounded before. For a backward both are written down too, rounded, in pairs of gate and up, and
from them come the gradients, with the layer's inner values computed once more instead of being kept.

A few rows are bound by the way of the weights through memory: there the weights are the left operand, whose tiles may
not be narrower than 64, and the rows are the right one. Many are bound by arithmetic, and ``gated_library`` computes
them, and their gradients, where it can. Otherwise torch's product in float32 and a pass over it are often quicker than
the kernel here (``gated_tiles``). GPUs other than Hopper always use those: neither kernel has been tried there.

Shape legend: T rows, I inputs, W inner width, O = 2 W; M rows and N columns of a tile, K inputs at a time.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from headrace.kernels import gated_library
from headrace.kernels.chip import HOPPER, chip
from headrace.kernels.gated_tiles import Tiles, choose_gradient_tiles, choose_library_tiles, choose_tiles
from headrace.kernels.tiled_matrix import in_tiles

_ROWS_AT_ONCE = 4096
"""Of torch's product, whose float32 results are the largest tensors there are."""
_COLUMNS = 1024
"""Of a program that passes over products."""
_PAIR_WARPS = 8
"""Of one that reads pairs: with four columns a thread none of them moves to another."""


class GatedWeights(NamedTuple):
    """Dense, of one dtype."""

    gate: torch.Tensor
    """[W, I]."""
    up: torch.Tensor
    """[W, I]."""
    whole: torch.Tensor | None
    """[O, I], whose halves the two are; None: they lie apart."""


def gated_product(
    x_TI: torch.Tensor, weights: GatedWeights, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[T, W] of dense rows, and with ``keep`` both products in pairs, [T, O]."""
    generation, num_multiprocessors = chip(x_TI.device)
    if generation != HOPPER:
        return by_torch(x_TI, weights, keep=keep)
    sizes = (*x_TI.shape, weights.gate.shape[0])
    if weights.whole is not None and gated_library.is_installed():
        library_tiles = choose_library_tiles(*sizes)
        if library_tiles is not None:
            return gated_library.library_product(x_TI, weights.whole, library_tiles, keep=keep)
    tiles = choose_tiles(*sizes, keep=keep, num_multiprocessors=num_multiprocessors)
    if tiles is not None:
        return tiled_product(x_TI, weights, tiles, keep=keep)
    return by_torch(x_TI, weights, keep=keep)


def tiled_product(
    x_TI: torch.Tensor, weights: GatedWeights, tiles: Tiles, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same by the one kernel, in these tiles."""
    assert all(matrix.is_contiguous() for matrix in (x_TI, weights.gate, weights.up))
    (num_rows, num_inputs), width = x_TI.shape, weights.gate.shape[0]
    inner_TW = x_TI.new_empty((num_rows, width))
    products_TO = x_TI.new_empty((num_rows, 2 * width)) if keep else None
    grid = (triton.cdiv(num_rows, tiles.rows) * triton.cdiv(width, tiles.columns),)
    if num_rows:
        _gated_product[grid](
            in_tiles(x_TI, tiles.rows, tiles.inputs), in_tiles(weights.gate, tiles.columns, tiles.inputs),
            in_tiles(weights.up, tiles.columns, tiles.inputs),
            inner_TW, inner_TW if products_TO is None else products_TO, num_rows,
            W=width, INPUTS=num_inputs, M=tiles.rows, N=tiles.columns, K=tiles.inputs, TOGETHER=tiles.together,
            WEIGHTS_LEFT=tiles.weights_left, KEEP=keep, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return inner_TW, products_TO


def gate(products_TO: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, W] in ``dtype`` of dense products, all of the gate's before all of the others."""
    num_rows, width = products_TO.shape[0], products_TO.shape[1] // 2
    inner_TW = products_TO.new_empty((num_rows, width), dtype=dtype)
    if num_rows:
        _gate[(num_rows, triton.cdiv(width, _COLUMNS))](products_TO, inner_TW, W=width, N=_COLUMNS)
    return inner_TW


def product_gradients(
    grad_TI: torch.Tensor, down_IW: torch.Tensor, products_TO: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``gate_gradients``, from the gradient of what the layer adds; all are dense. With many rows that of the inner
    values is neither rounded nor written."""
    if chip(grad_TI.device).generation == HOPPER and gated_library.is_installed():
        tiles = choose_gradient_tiles(grad_TI.shape[0], *down_IW.shape)
        if tiles is not None:
            return gated_library.library_gradients(grad_TI, down_IW, products_TO, tiles)
    return gate_gradients(grad_TI @ down_IW, products_TO)


def gate_gradients(grad_TW: torch.Tensor, products_TO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of both products, [T, O], all of the gate's before all of the others, from products in pairs and the
    gradient of the inner values; and the inner values once more, [T, W]."""
    num_rows, width = grad_TW.shape
    inner_TW, grads_TO = torch.empty_like(grad_TW), torch.empty_like(products_TO)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, _COLUMNS))
        _gate_gradients[grid](
            grad_TW, products_TO, grads_TO, inner_TW, W=width, N=_COLUMNS, num_warps=_PAIR_WARPS
        )
    return grads_TO, inner_TW


def by_torch(
    x_TI: torch.Tensor, weights: GatedWeights, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same by torch's product in float32, and a pass over it."""
    matrices = (weights.gate, weights.up) if weights.whole is None else (weights.whole,)
    inner, products = [], []
    for rows in x_TI.split(_ROWS_AT_ONCE):
        wide = _one([torch.mm(rows, matrix.t(), out_dtype=torch.float32) for matrix in matrices], dim=1)
        inner.append(gate(wide, x_TI.dtype))
        if keep:
            products.append(in_pairs(wide.to(x_TI.dtype)))
    return _one(inner), _one(products) if keep else None


def in_pairs(products_TO: torch.Tensor) -> torch.Tensor:
    """The first number of one half, of the other, the second of one half, and so on."""
    return torch.stack(products_TO.chunk(2, -1), -1).flatten(-2)


def _one(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_product(
    x, gate_weight, up_weight, inner, products, num_rows,
    W: tl.constexpr, INPUTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    TOGETHER: tl.constexpr, WEIGHTS_LEFT: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """``x`` and the weights hand out tiles, zeros beyond their edges."""
    NUM_COLUMNS: tl.constexpr = (W + N - 1) // N
    block = tl.program_id(0) // (TOGETHER * NUM_COLUMNS)
    within = tl.program_id(0) % (TOGETHER * NUM_COLUMNS)
    num_together = tl.minimum(tl.cdiv(num_rows, M) - block * TOGETHER, TOGETHER)
    row = (block * TOGETHER + within % num_together) * M
    column = within // num_together * N
    gate_sum = tl.zeros([N, M] if WEIGHTS_LEFT else [M, N], tl.float32)
    up_sum = tl.zeros([N, M] if WEIGHTS_LEFT else [M, N], tl.float32)
    for k in range(0, INPUTS, K):
        x_MK = x.load([row, k])
        gate_NK = gate_weight.load([column, k])
        up_NK = up_weight.load([column, k])
        if WEIGHTS_LEFT:
            gate_sum = tl.dot(gate_NK, x_MK.T, gate_sum)
            up_sum = tl.dot(up_NK, x_MK.T, up_sum)
        else:
            gate_sum = tl.dot(x_MK, gate_NK.T, gate_sum)
            up_sum = tl.dot(x_MK, up_NK.T, up_sum)
    if WEIGHTS_LEFT:
        gate_sum, up_sum = tl.trans(gate_sum), tl.trans(up_sum)
    row_M, column_N = row + tl.arange(0, M), column + tl.arange(0, N)
    there_MN = (row_M < num_rows)[:, None] & (column_N < W)[None, :]
    place_M1 = row_M.to(tl.int64)[:, None]
    if KEEP:
        column_O = column * 2 + tl.arange(0, 2 * N)
        there_MO = (row_M < num_rows)[:, None] & (column_O < 2 * W)[None, :]
        pairs_MO = tl.interleave(gate_sum, up_sum).to(products.dtype.element_ty)
        tl.store(products + place_M1 * (2 * W) + column_O[None, :], pairs_MO, mask=there_MO)
    made_MN = gate_sum * _sigmoid(gate_sum) * up_sum
    tl.store(inner + place_M1 * W + column_N[None, :], made_MN.to(inner.dtype.element_ty), mask=there_MN)


@triton.jit
def _gate(products, inner, W: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column_N = tl.program_id(1) * N + tl.arange(0, N)
    there_N = column_N < W
    at_N = products + row * (2 * W) + column_N
    gate_N = tl.load(at_N, mask=there_N, other=0.0).to(tl.float32)
    up_N = tl.load(at_N + W, mask=there_N, other=0.0).to(tl.float32)
    made_N = gate_N * _sigmoid(gate_N) * up_N
    tl.store(inner + row * W + column_N, made_N.to(inner.dtype.element_ty), mask=there_N)


@triton.jit
def _gate_gradients(grad, products, grads, inner, W: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column_N = tl.program_id(1) * N + tl.arange(0, N)
    column_O = tl.program_id(1) * (2 * N) + tl.arange(0, 2 * N)
    there_N = column_N < W
    at_N, place_N = row * (2 * W) + column_N, row * W + column_N
    pairs_O = tl.load(products + row * (2 * W) + column_O, mask=column_O < 2 * W, other=0.0)
    gate_N, up_N = tl.split(pairs_O.reshape(N, 2))
    gate_N, up_N = gate_N.to(tl.float32), up_N.to(tl.float32)
    grad_N = tl.load(grad + place_N, mask=there_N, other=0.0).to(tl.float32)
    sigmoid_N = _sigmoid(gate_N)
    silu_N = gate_N * sigmoid_N
    slope_N = sigmoid_N + silu_N * (1.0 - sigmoid_N)
    dtype = grads.dtype.element_ty
    tl.store(grads + at_N, (grad_N * up_N * slope_N).to(dtype), mask=there_N)
    tl.store(grads + at_N + W, (grad_N * silu_N).to(dtype), mask=there_N)
    tl.store(inner + place_N, (silu_N * up_N).to(dtype), mask=there_N)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
