"""Key-value rows kept in blocks: writing them, and prompts attending to them, as kernels that a CUDA graph can hold.

In: queries, keys and values of a pass, the pool of one layer, block tables and what each row may see, all on the
device. Out: written into a tensor the caller owns. Nothing here reads a tensor on the host, and grids depend
on shapes and static limits alone, so a captured launch stays right when the numbers in its inputs change.

A padding row of the pass writes its key and value to block 0, which nobody reads.

Shape legend: T rows of the pass, B blocks, H query heads, K key-value heads, D key head dim, E value head dim,
S rows of a block, W = K * (D + E).
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.pool import load_rotated, padded_dim
from headrace.kernels.prefill import PIECES_AT_ONCE, prefill_kernel
from headrace.kernels.rotation import Rotation


def write_rows(
    pool_BSW: torch.Tensor,
    places_T: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKE: torch.Tensor,
    rotation: Rotation | None = None,
) -> None:
    """Put the keys and values of a pass where ``places_T`` (int64, block * S + row) says, keys after ``rotation``."""
    num_rows, num_heads, key_dim = key_TKD.shape
    value_dim = value_TKE.shape[2]
    if num_rows == 0:
        return
    _write_kernel[(num_rows,)](
        pool_BSW,
        places_T,
        key_TKD,
        value_TKE,
        *angles(rotation, key_TKD),
        key_TKD.stride(0),
        key_TKD.stride(1),
        value_TKE.stride(0),
        value_TKE.stride(1),
        K=num_heads,
        D=key_dim,
        E=value_dim,
        KEYS=triton.next_power_of_2(num_heads * key_dim),
        VALUES=triton.next_power_of_2(num_heads * value_dim),
        ROTATE=rotation is not None,
        num_warps=4,
    )


def angles(rotation: Rotation | None, unread: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """As kernels take a rotation: cosines, sines and their stride; where there is none, something they do not read."""
    if rotation is None:
        return unread, unread, 0
    cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
    return cos, sin, cos.stride(0)


@triton.jit
def _write_kernel(
    pool,
    places,
    key,
    value,
    cos,
    sin,
    angle_stride,
    key_stride_t,
    key_stride_k,
    value_stride_t,
    value_stride_k,
    K: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    ROTATE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = pool + tl.load(places + row) * (K * (D + E))
    i = tl.arange(0, KEYS)
    heads = key + row * key_stride_t + i // D * key_stride_k
    there = i < K * D
    numbers = load_rotated(heads, i % D, there, cos + row * angle_stride, sin + row * angle_stride, D, ROTATE)
    tl.store(target + i, numbers, mask=there)
    i = tl.arange(0, VALUES)
    numbers = tl.load(value + row * value_stride_t + i // E * value_stride_k + i % E, mask=i < K * E)
    tl.store(target + K * D + i, numbers, mask=i < K * E)


def prefill_attention(
    query_THD: torch.Tensor,
    pool_BSW: torch.Tensor,
    tables: torch.Tensor,
    *,
    slots: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    value_dim: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rotation: Rotation | None = None,
    out_THE: torch.Tensor,
) -> None:
    """Pieces of prompts: piece i is ``counts[i]`` (0 is allowed) query rows from row ``offsets[i]`` of the pass, at
    positions ``starts[i]`` and on, over the table ``slots[i]`` (int32 all). Rows of the pass that belong to no
    piece are left as they are."""
    num_rows, num_heads, key_dim = query_THD.shape
    num_kv_heads = pool_BSW.shape[2] // (key_dim + value_dim)
    group = num_heads // num_kv_heads
    num_pieces = counts.shape[0]
    rows, tile, num_warps, num_stages = prefill_shape(key_dim, pool_BSW.dtype)
    if num_pieces == 0:
        return
    # A piece has one tile at most that is not full.
    most_tiles = triton.cdiv(num_rows * group, rows) + num_pieces
    cos, sin, angle_stride = angles(rotation, query_THD)
    prefill_kernel[(most_tiles, num_kv_heads)](
        query_THD,
        cos,
        sin,
        pool_BSW,
        tables,
        slots,
        starts,
        counts,
        offsets,
        out_THE,
        num_pieces,
        scale,
        query_THD.stride(0),
        query_THD.stride(1),
        angle_stride,
        out_THE.stride(0),
        out_THE.stride(1),
        tables.stride(0),
        K=num_kv_heads,
        G=group,
        D=key_dim,
        D_PAD=padded_dim(key_dim),
        E=value_dim,
        E_PAD=padded_dim(value_dim),
        S=pool_BSW.shape[1],
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        EXACT=pool_BSW.dtype == torch.float32,
        ROTATE=rotation is not None,
        M=rows,
        N=tile,
        P=PIECES_AT_ONCE,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def prefill_shape(key_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Query rows and key-value rows of a tile, warps, pipeline stages."""
    if dtype == torch.float32:
        return 32, 32, 4, 2
    return (64, 64, 4, 3) if key_dim <= 128 else (64, 32, 4, 2)
