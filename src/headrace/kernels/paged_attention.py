"""Attention over key-value rows kept in blocks, as kernels that a CUDA graph can hold.

In: queries of a pass, the pool of one layer, block tables and what each row may see, all on the device. Out:
written into a tensor the caller owns. Nothing here reads a tensor on the host, and grids depend on shapes
and static limits alone, so a captured launch stays right when the numbers in its inputs change.

A padding row of the pass writes its key and value to block 0, which nobody reads.

Shape legend: T rows of the pass, B decode rows or blocks, H query heads, K key-value heads, G = H / K,
D key head dim, E value head dim, S rows of a block, W = K * (D + E).
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.kernels.decode import decode_kernel, join_kernel
from headrace.kernels.prefill import prefill_kernel

_MAX_SPANS = 32
_MIN_SPAN = 256
"""Key-value rows below which a span is not worth a program of its own."""
_PROGRAMS_PER_MULTIPROCESSOR = 4


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Where the spans of a decode pass leave their partial results; one serves every layer of a stream."""

    max_length: int
    """The longest sequence a row may have."""
    num_programs: int
    """How many programs fill the chip."""
    sums: torch.Tensor
    stats: torch.Tensor

    def num_spans(self, num_pairs: int) -> int:
        """Spans a row is split into at most, for this many pairs of a row and a key-value head; a power of two,
        so that few kernels are compiled. Nearly enough pairs are still halved, since lengths differ."""
        if num_pairs >= self.num_programs:
            return 1
        wanted = max(2, triton.next_power_of_2(self.num_programs // num_pairs))
        return min(wanted, _MAX_SPANS, triton.next_power_of_2(triton.cdiv(self.max_length, _MIN_SPAN)))


def decode_workspace(
    max_rows: int, num_heads: int, value_dim: int, max_length: int, device: torch.device
) -> DecodeWorkspace:
    num_multiprocessors = 8
    if device.type == "cuda":
        num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    num_programs = num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
    # ``num_spans`` makes at most twice as many programs as fill the chip.
    num_slots = min(2 * num_programs, max_rows * _MAX_SPANS)
    return DecodeWorkspace(
        max_length=max_length,
        num_programs=num_programs,
        sums=torch.empty(num_slots * num_heads * value_dim, dtype=torch.float32, device=device),
        stats=torch.empty(num_slots * num_heads * 2, dtype=torch.float32, device=device),
    )


def write_rows(
    pool_BSW: torch.Tensor, slots_T: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor
) -> None:
    """Put the keys and values of a pass where ``slots_T`` (int64, block * S + row) says."""
    num_rows, num_heads, key_dim = key_TKD.shape
    value_dim = value_TKD.shape[2]
    if num_rows == 0:
        return
    _write_kernel[(num_rows,)](
        pool_BSW,
        slots_T,
        key_TKD,
        value_TKD,
        key_TKD.stride(0),
        key_TKD.stride(1),
        value_TKD.stride(0),
        value_TKD.stride(1),
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
    slots,
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
    target = pool + tl.load(slots + row) * (K * (D + E))
    i = tl.arange(0, KEYS)
    numbers = tl.load(key + row * key_stride_t + i // D * key_stride_k + i % D, mask=i < K * D)
    tl.store(target + i, numbers, mask=i < K * D)
    i = tl.arange(0, VALUES)
    numbers = tl.load(value + row * value_stride_t + i // E * value_stride_k + i % E, mask=i < K * E)
    tl.store(target + K * D + i, numbers, mask=i < K * E)


def decode_attention(
    query_BHD: torch.Tensor,
    pool_BSW: torch.Tensor,
    tables: torch.Tensor,
    table_rows_B: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    value_dim: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out_BHE: torch.Tensor,
    workspace: DecodeWorkspace,
) -> None:
    """One query row a sequence. ``tables`` (int32 [slots, blocks]) is read at ``table_rows_B``;
    ``lengths_B`` (int32) counts the key-value rows a query sees, 0 for a padding row, which gets zeros."""
    num_rows, num_heads, key_dim = query_BHD.shape
    num_kv_heads = pool_BSW.shape[2] // (key_dim + value_dim)
    num_spans = workspace.num_spans(num_rows * num_kv_heads)
    group = num_heads // num_kv_heads
    tile, num_warps, num_stages = _decode_shape(key_dim, pool_BSW.dtype, num_spans)
    spans = {"WINDOW": window or 0, "SPANS": num_spans, "MIN_SPAN": _MIN_SPAN, "TILE": tile}
    values = {"E": value_dim, "E_PAD": triton.next_power_of_2(value_dim)}
    decode_kernel[(num_kv_heads, num_spans, num_rows)](
        query_BHD,
        pool_BSW,
        tables,
        table_rows_B,
        lengths_B,
        out_BHE,
        workspace.sums,
        workspace.stats,
        scale,
        query_BHD.stride(0),
        query_BHD.stride(1),
        out_BHE.stride(0),
        out_BHE.stride(1),
        tables.stride(0),
        K=num_kv_heads,
        G=group,
        P=max(16, triton.next_power_of_2(group)),
        D=key_dim,
        D_PAD=triton.next_power_of_2(key_dim),
        S=pool_BSW.shape[1],
        SOFTCAP=softcap or 0.0,
        EXACT=pool_BSW.dtype == torch.float32,
        num_warps=num_warps,
        num_stages=num_stages,
        **values,
        **spans,
    )
    if num_spans > 1:
        join_kernel[(num_heads, num_rows)](
            lengths_B,
            out_BHE,
            workspace.sums,
            workspace.stats,
            out_BHE.stride(0),
            out_BHE.stride(1),
            num_warps=4,
            **values,
            **spans,
        )


def _decode_shape(key_dim: int, dtype: torch.dtype, num_spans: int) -> tuple[int, int, int]:
    """Key-value rows of a tile, warps, pipeline stages. Many programs share a multiprocessor and hide each other's
    waits, so they are small; few must each ask for much ahead. Chosen by timing on an H200."""
    if dtype == torch.float32 or key_dim > 128:
        return 32, 4, 2
    if key_dim <= 64:
        return (64, 2, 2) if num_spans <= 2 else (128, 4, 2)
    return (64, 4, 2) if num_spans <= 2 else (64, 4, 3)


def prefill_attention(
    query_THD: torch.Tensor,
    pool_BSW: torch.Tensor,
    tables: torch.Tensor,
    *,
    row_of_piece: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    max_count: int,
    value_dim: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out_THE: torch.Tensor,
) -> None:
    """Pieces of prompts: piece i is ``counts[i]`` (at most ``max_count``; 0 is allowed) query rows from row
    ``offsets[i]`` of the pass, at positions ``starts[i]`` and on, over the table ``row_of_piece[i]`` (int32
    all). Rows of the pass that belong to no piece are left as they are."""
    num_heads, key_dim = query_THD.shape[1:]
    num_kv_heads = pool_BSW.shape[2] // (key_dim + value_dim)
    group = num_heads // num_kv_heads
    num_pieces = counts.shape[0]
    rows, tile, num_warps, num_stages = _prefill_shape(key_dim, pool_BSW.dtype)
    if num_pieces == 0:
        return
    prefill_kernel[(triton.cdiv(max_count * group, rows), num_kv_heads, num_pieces)](
        query_THD,
        pool_BSW,
        tables,
        row_of_piece,
        starts,
        counts,
        offsets,
        out_THE,
        scale,
        query_THD.stride(0),
        query_THD.stride(1),
        out_THE.stride(0),
        out_THE.stride(1),
        tables.stride(0),
        K=num_kv_heads,
        G=group,
        D=key_dim,
        D_PAD=triton.next_power_of_2(key_dim),
        E=value_dim,
        E_PAD=triton.next_power_of_2(value_dim),
        S=pool_BSW.shape[1],
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        EXACT=pool_BSW.dtype == torch.float32,
        M=rows,
        N=tile,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _prefill_shape(key_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Query rows and key-value rows of a tile, warps, pipeline stages."""
    if dtype == torch.float32:
        return 32, 32, 4, 2
    return (64, 64, 4, 3) if key_dim <= 128 else (64, 32, 4, 2)
