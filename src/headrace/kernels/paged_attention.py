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

from headrace.kernels.pool import padded_dim
from headrace.kernels.prefill import PIECES_AT_ONCE, prefill_kernel


def write_rows(
    pool_BSW: torch.Tensor, places_T: torch.Tensor, key_TKD: torch.Tensor, value_TKE: torch.Tensor
) -> None:
    """Put the keys and values of a pass where ``places_T`` (int64, block * S + row) says."""
    num_rows, num_heads, key_dim = key_TKD.shape
    value_dim = value_TKE.shape[2]
    if num_rows == 0:
        return
    _write_kernel[(num_rows,)](
        pool_BSW,
        places_T,
        key_TKD,
        value_TKE,
        key_TKD.stride(0),
        key_TKD.stride(1),
        value_TKE.stride(0),
        value_TKE.stride(1),
        K=num_heads,
        D=key_dim,
        E=value_dim,
        KEYS=triton.next_power_of_2(num_heads * key_dim),
        VALUES=triton.next_power_of_2(num_heads * value_dim),
        num_warps=4,
    )


@triton.jit
def _write_kernel(
    pool,
    places,
    key,
    value,
    key_stride_t,
    key_stride_k,
    value_stride_t,
    value_stride_k,
    K: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = pool + tl.load(places + row) * (K * (D + E))
    i = tl.arange(0, KEYS)
    numbers = tl.load(key + row * key_stride_t + i // D * key_stride_k + i % D, mask=i < K * D)
    tl.store(target + i, numbers, mask=i < K * D)
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
    prefill_kernel[(most_tiles, num_kv_heads)](
        query_THD,
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
