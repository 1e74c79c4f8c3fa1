"""Decode attention over key-value rows kept in blocks: one query row a sequence, as launches a CUDA graph can hold.

In: queries, keys and values of a pass, the pool of one layer, block tables, how many rows each query sees and the list
of spans they are split into (``dealing``), all on the device. Out: written into a tensor the caller owns; keys and
values are in the pool then. Grids depend on shapes and static limits alone.

Rows that share a prefix may have it read once for all of them: a second kernel attends them to the prefix
together, while the decode kernel attends each to what it has for itself. Both leave what they find in the
workspace, and whichever is last with a row makes its output.

Shape legend: B decode rows or blocks, H query heads, K key-value heads, G = H / K, D key head dim, E value head
dim, S rows of a block, W = K * (D + E).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton

from headrace.kernels.chip import chip
from headrace.kernels.dealing import Spans, most_spans
from headrace.kernels.decode import decode_kernel
from headrace.kernels.decode_shapes import (
    MOST_AT_ONCE,
    PrefixShape,
    decode_shape,
    padded_heads,
    prefix_shape,
)
from headrace.kernels.paged_attention import angles
from headrace.kernels.pool import padded_dim
from headrace.kernels.prefix import prefix_kernel
from headrace.kernels.rotation import Rotation
from headrace.kernels.shared_prefixes import MAX_MEMBERS, SharedPrefixes
from headrace.kernels.states import PART_STEP

_MAX_PARTS = 32
_PREFIX_STATES = 512
"""Rows times parts of a prefix: with 8 rows a piece, about as many programs a key-value head as fill the chip."""
_LEAST_ROWS_BESIDE = 64
"""With fewer, prefixes that are worth reading once are long, and what rows have for themselves is in their way."""


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Where the pieces of a decode pass leave their partial results; one serves every layer of a stream."""

    max_length: int
    """The longest sequence a row may have."""
    sums: torch.Tensor
    stats: torch.Tensor
    """Of every entry of the list of spans and query head."""
    arrived: torch.Tensor
    """Spans and parts that have left theirs, by row and key-value head; zero between passes."""
    num_prefix_states: int
    prefix_sums: torch.Tensor
    prefix_stats: torch.Tensor
    side: torch.cuda.Stream | None
    """Where prefixes of many rows are attended meanwhile; none where kernels are interpreted."""

    def num_prefix_parts(self, num_rows: int) -> int:
        """Parts a shared prefix is split into at most, in a pass of this many rows."""
        longest = triton.cdiv(self.max_length, PART_STEP.value)
        return min(_MAX_PARTS, self.num_prefix_states // num_rows, longest)


def decode_workspace(
    max_rows: int, num_heads: int, value_dim: int, max_length: int, device: torch.device
) -> DecodeWorkspace:
    # Of a key-value head; with several of them fewer spans run at once.
    num_entries = most_spans(max_rows, chip(device).num_multiprocessors * MOST_AT_ONCE)
    num_prefix_states = max(_PREFIX_STATES, max_rows)

    def floats(count: int) -> torch.Tensor:
        return torch.empty(count * num_heads, dtype=torch.float32, device=device)

    return DecodeWorkspace(
        max_length=max_length,
        sums=floats(num_entries * value_dim),
        stats=floats(num_entries * 2),
        arrived=torch.zeros(max_rows * num_heads, dtype=torch.int32, device=device),
        num_prefix_states=num_prefix_states,
        prefix_sums=floats(num_prefix_states * value_dim),
        prefix_stats=floats(num_prefix_states * 2),
        # Its few programs come first, or they would wait for most of the others and be the tail of the pass.
        side=torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None,
    )


def spans_at_once(
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    key_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sharing: bool,
) -> int:
    """Spans of a pass of so many rows, of all of them together, that are read at the same time."""
    shape = decode_shape(
        num_rows, num_heads // num_kv_heads, num_kv_heads, key_dim, dtype, chip(device), is_shared=sharing
    )
    return shape.num_at_once * chip(device).num_multiprocessors // num_kv_heads


def decode_attention(
    query_BHD: torch.Tensor,
    key_BKD: torch.Tensor,
    value_BKE: torch.Tensor,
    pool_BSW: torch.Tensor,
    tables: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    shared: SharedPrefixes | None = None,
    rotation: Rotation | None = None,
    spans: Spans,
    out_BHE: torch.Tensor,
    workspace: DecodeWorkspace,
    of_prefixes: PrefixShape | None = None,
) -> None:
    """One query row a sequence. ``tables`` (int32 [slots, blocks]) is read at ``slots_B``;
    ``lengths_B`` (int32) counts the key-value rows a query sees, of which the last are ``key_BKD`` and ``value_BKE``;
    it is 0 for a padding row, which gets zeros. Prefixes that are ``shared`` are read once a piece, unless a window
    makes them short anyway. Queries and keys are given before ``rotation``. ``spans`` has one of every row at least;
    how many decides how rows are split and nothing else. ``of_prefixes``: None is as they were the quickest."""
    num_rows, num_heads, key_dim = query_BHD.shape
    num_kv_heads, value_dim = value_BKE.shape[1:]
    group = num_heads // num_kv_heads
    shared = None if window else shared
    this_chip, dtype = chip(query_BHD.device), pool_BSW.dtype
    shape = decode_shape(
        num_rows, group, num_kv_heads, key_dim, dtype, this_chip, is_shared=shared is not None
    )
    heads = {
        "K": num_kv_heads,
        "G": group,
        "D": key_dim,
        "D_PAD": padded_dim(key_dim),
        "E": value_dim,
        "E_PAD": padded_dim(value_dim),
        "S": pool_BSW.shape[1],
        "SOFTCAP": softcap or 0.0,
        "EXACT": dtype == torch.float32,
        "ROTATE": rotation is not None,
    }
    cos, sin, angle_stride = turned = angles(rotation, query_BHD)
    attend_own = partial(
        decode_kernel[(num_kv_heads, len(spans.rows))],
        query_BHD, key_BKD, value_BKE, cos, sin, pool_BSW, tables, slots_B, lengths_B, *spans, out_BHE,
        workspace.sums, workspace.stats, workspace.arrived, lengths_B if shared is None else shared.begins,
        workspace.prefix_sums, workspace.prefix_stats, workspace.num_prefix_parts(num_rows), scale,
        *query_BHD.stride()[:2], *key_BKD.stride()[:2], *value_BKE.stride()[:2], angle_stride,
        *out_BHE.stride()[:2], tables.stride(0),
        P=padded_heads(group), WINDOW=window or 0, SHARED=shared is not None, TILE=shape.tile,
        num_warps=shape.num_warps, num_stages=shape.num_stages, **heads,
    )  # fmt: skip
    if shared is None:
        attend_own()
        return
    beside = num_rows >= _LEAST_ROWS_BESIDE
    of_prefixes = of_prefixes or prefix_shape(key_dim, dtype, is_alone=not beside)
    attend_prefixes = partial(
        _attend_prefixes, query_BHD, turned, pool_BSW, tables, slots_B, lengths_B, spans, shared, scale, out_BHE,
        workspace, of_prefixes, heads | {"SPAN_STEP": shape.tile},
    )  # fmt: skip
    _side_by_side(attend_prefixes, attend_own, workspace.side if beside else None)


def _attend_prefixes(
    query_BHD: torch.Tensor,
    turned: tuple[torch.Tensor, torch.Tensor, int],
    pool_BSW: torch.Tensor,
    tables: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    spans: Spans,
    shared: SharedPrefixes,
    scale: float,
    out_BHE: torch.Tensor,
    workspace: DecodeWorkspace,
    shape: PrefixShape,
    heads: dict[str, Any],
) -> None:
    """Attend the rows of each piece to the prefix they share."""
    num_rows, heads_padded = query_BHD.shape[0], triton.next_power_of_2(heads["G"])
    most_lines = MAX_MEMBERS * heads_padded
    # A program has whole members, however many heads they have.
    lines = max(16, heads_padded, min(shape.lines, most_lines))
    each_piece = heads["K"] * triton.cdiv(most_lines, lines), workspace.num_prefix_parts(num_rows)
    # Programs for full pieces; where there are more, smaller ones, each takes several.
    num_pieces = triton.cdiv(num_rows, MAX_MEMBERS)
    if shape.num_at_once is not None:
        at_once = shape.num_at_once * chip(query_BHD.device).num_multiprocessors
        num_pieces = max(1, min(num_pieces, at_once // math.prod(each_piece)))
    cos, sin, angle_stride = turned
    limits = {} if shape.most_registers is None else {"maxnreg": shape.most_registers}
    prefix_kernel[(*each_piece, num_pieces)](
        query_BHD, cos, sin, pool_BSW, tables, slots_B, lengths_B, spans.firsts, out_BHE,
        shared.begins, shared.members, shared.starts, shared.num_pieces,
        workspace.prefix_sums, workspace.prefix_stats, workspace.arrived, workspace.sums, workspace.stats,
        scale, *query_BHD.stride()[:2], angle_stride, *out_BHE.stride()[:2], tables.stride(0),
        Q=heads_padded, M=lines, TILE=shape.tile, num_warps=shape.num_warps, num_stages=shape.num_stages,
        **heads, **limits,
    )  # fmt: skip


def _side_by_side(
    attend_prefixes: Callable[[], object], attend_own: Callable[[], object], side: torch.cuda.Stream | None
) -> None:
    """Both launched to run at once, in this stream and at its side; what this stream is given afterwards waits for
    both, so that memory they use may be freed then. In a CUDA graph they are two branches."""
    if side is None:
        attend_prefixes()
        attend_own()
        return
    here = torch.cuda.current_stream(side.device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        attend_prefixes()
    attend_own()
    here.wait_stream(side)
