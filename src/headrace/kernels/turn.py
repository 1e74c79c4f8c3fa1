"""Queries, keys and values out of one product, the first two rotated, and their gradients back into one.

In: a dense product, of which each row is the query heads, key heads and value heads of a token, and the row's cosines
and sines. Out: the three apart and dense; or of their gradients the product's, each number read and written once.
Turned in float32 and rounded once, as by attention that reads them unturned (``load_rotated`` in ``kernels/pool``).

Shape legend: T rows, Q query heads, K key heads and as many of values, D head dim, H half of it, N heads of a program.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.rotation import Rotation

_TILE, _WARPS = 2048, 4
"""Numbers of each half that a program reads: in bfloat16 a thread asks for each half, and for its cosines and sines, by
two accesses of 16 bytes."""


def turn_heads(
    product: torch.Tensor, rotation: Rotation, num_query_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, Q, D], [T, K, D] and [T, K, D] of [T, (Q + 2 K) * D]."""
    num_rows, dim = rotation.cos.shape
    num_kv_heads = (product.shape[1] // dim - num_query_heads) // 2
    query = product.new_empty((num_rows, num_query_heads, dim))
    key, value = (product.new_empty((num_rows, num_kv_heads, dim)) for _ in range(2))
    _launch(product, (query, key, value), rotation, back=False)
    return query, key, value


def turn_gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation
) -> torch.Tensor:
    """Of the product, [T, (Q + 2 K) * D], of those of the three."""
    num_rows, dim = rotation.cos.shape
    product = query.new_empty((num_rows, (query.shape[1] + 2 * key.shape[1]) * dim))
    _launch(product, (query, key, value), rotation, back=True)
    return product


def _launch(
    product: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rotation: Rotation,
    *,
    back: bool,
) -> None:
    query, key, value = parts
    (num_rows, num_query, dim), num_kv = query.shape, key.shape[1]
    assert key.shape == value.shape == (num_rows, num_kv, dim) and rotation.sin.shape == (num_rows, dim)
    assert product.shape == (num_rows, (num_query + 2 * num_kv) * dim) and dim % 2 == 0
    assert all(x.is_contiguous() for x in (product, *parts, *rotation))
    num_heads = num_rows * (num_query + 2 * num_kv)
    if num_heads:
        half = triton.next_power_of_2(dim // 2)
        heads_at_once = max(1, _TILE // half)
        grid = (triton.cdiv(num_heads, heads_at_once),)
        _turn[grid](
            product, query, key, value, *rotation, num_heads,
            Q=num_query, K=num_kv, D=dim, H_PAD=half, N=heads_at_once, BACK=back, num_warps=_WARPS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_heads"])
def _turn(
    product, query, key, value, cos, sin, num_heads,
    Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr, H_PAD: tl.constexpr, N: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Heads of all rows are one list, in the order in which the product has them."""
    H: tl.constexpr = D // 2
    number_N = tl.program_id(0) * N + tl.arange(0, N)
    row_N, head_N = (number_N // (Q + 2 * K)).to(tl.int64), number_N % (Q + 2 * K)
    is_turned_N = head_N < Q + K
    part_N = tl.where(
        head_N < Q,
        query + (row_N * Q + head_N) * D,
        tl.where(is_turned_N, key + (row_N * K + head_N - Q) * D, value + (row_N * K + head_N - Q - K) * D),
    )
    dims_H = tl.arange(0, H_PAD)
    part_NH = part_N[:, None] + dims_H[None, :]
    product_NH = product + number_N.to(tl.int64)[:, None] * D + dims_H[None, :]
    there_NH = (number_N < num_heads)[:, None] & (dims_H < H)[None, :]
    # All are read in one shape, hence in one layout, so that nothing is moved between threads.
    angle_NH = row_N[:, None] * D + dims_H[None, :]
    turned_NH = there_NH & is_turned_N[:, None]
    first_NH, second_NH = _read(part_NH if BACK else product_NH, there_NH, H)
    cos_1, cos_2 = _read(cos + angle_NH, turned_NH, H)
    sin_1, sin_2 = _read(sin + angle_NH, turned_NH, H)
    if BACK:
        # The same matrix with rows for columns.
        sin_1, sin_2 = -sin_2, -sin_1
    turned_1 = first_NH * cos_1 + second_NH * -sin_1
    turned_2 = second_NH * cos_2 + first_NH * sin_2
    to_NH = product_NH if BACK else part_NH
    dtype = product.dtype.element_ty
    tl.store(to_NH, tl.where(is_turned_N[:, None], turned_1, first_NH).to(dtype), mask=there_NH)
    tl.store(to_NH + H, tl.where(is_turned_N[:, None], turned_2, second_NH).to(dtype), mask=there_NH)


@triton.jit
def _read(place_NH, there_NH, H: tl.constexpr):
    """Both halves, in float32."""
    first_NH = tl.load(place_NH, mask=there_NH, other=0.0).to(tl.float32)
    return first_NH, tl.load(place_NH + H, mask=there_NH, other=0.0).to(tl.float32)
