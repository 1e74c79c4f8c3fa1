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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from headrace.kernels.chip import chip
from headrace.kernels.dealing import Spans, most_spans
from headrace.kernels.decode import decode_kernel
from headrace.kernels.paged_attention import angles, prefill_shape
from headrace.kernels.pool import padded_dim
from headrace.kernels.prefix import prefix_kernel
from headrace.kernels.rotation import Rotation
from headrace.kernels.shared_prefixes import MAX_MEMBERS, SharedPrefixes
from headrace.kernels.states import PART_STEP

_MOST_AT_ONCE = 6
"""Programs a multiprocessor of any ``DecodeShape``."""
_MAX_PARTS = 32
_MOST_SCORES = 1024
"""Of a tile, one for each key and query head."""
_PREFIX_STATES = 512
"""Rows times parts of a prefix: with 8 rows a piece, about as many programs a key-value head as fill the chip."""


class DecodeShape(NamedTuple):
    """Of the programs of a pass."""

    tile: int
    """Key-value rows."""
    num_warps: int
    num_stages: int
    """Of the pipeline."""
    num_at_once: int
    """To which the key-value rows are dealt out, for each multiprocessor; no more than there is room for."""


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
    """Where prefixes are attended meanwhile; none where kernels are interpreted."""

    def num_prefix_parts(self, num_rows: int) -> int:
        """Parts a shared prefix is split into at most, in a pass of this many rows."""
        longest = triton.cdiv(self.max_length, PART_STEP.value)
        return min(_MAX_PARTS, self.num_prefix_states // num_rows, longest)


def decode_workspace(
    max_rows: int, num_heads: int, value_dim: int, max_length: int, device: torch.device
) -> DecodeWorkspace:
    # Of a key-value head; with several of them fewer spans run at once.
    num_entries = most_spans(max_rows, chip(device).num_multiprocessors * _MOST_AT_ONCE)
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
    shape = _decode_shape(num_rows, num_heads // num_kv_heads, num_kv_heads, key_dim, dtype, device, sharing)
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
) -> None:
    """One query row a sequence. ``tables`` (int32 [slots, blocks]) is read at ``slots_B``;
    ``lengths_B`` (int32) counts the key-value rows a query sees, of which the last are ``key_BKD`` and ``value_BKE``;
    it is 0 for a padding row, which gets zeros. Prefixes that are ``shared`` are read once a piece, unless a window
    makes them short anyway. Queries and keys are given before ``rotation``. ``spans`` has one of every row at least;
    how many decides how rows are split and nothing else."""
    num_rows, num_heads, key_dim = query_BHD.shape
    num_kv_heads, value_dim = value_BKE.shape[1:]
    group = num_heads // num_kv_heads
    shared = None if window else shared
    shape = _decode_shape(
        num_rows, group, num_kv_heads, key_dim, pool_BSW.dtype, query_BHD.device, shared is not None
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
        "EXACT": pool_BSW.dtype == torch.float32,
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
        P=_padded(group), WINDOW=window or 0, SHARED=shared is not None, TILE=shape.tile,
        num_warps=shape.num_warps, num_stages=shape.num_stages, **heads,
    )  # fmt: skip
    if shared is None:
        attend_own()
        return
    attend_prefixes = partial(
        _attend_prefixes, query_BHD, turned, pool_BSW, tables, slots_B, lengths_B, spans, shared, scale, out_BHE,
        workspace, heads | {"SPAN_STEP": shape.tile},
    )  # fmt: skip
    _side_by_side(attend_prefixes, attend_own, workspace.side)


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
    heads: dict[str, Any],
) -> None:
    """Attend the rows of each piece to the prefix they share, while they are attended to what they have themselves."""
    num_rows, heads_padded = query_BHD.shape[0], triton.next_power_of_2(heads["G"])
    most_rows, tile, num_warps, num_stages = prefill_shape(heads["D"], pool_BSW.dtype)
    most_lines = MAX_MEMBERS * heads_padded
    # A program has whole members, however many heads they have.
    lines = max(16, heads_padded, min(most_rows, most_lines))
    # Programs for full pieces; where there are more, smaller ones, each takes several.
    grid = (
        heads["K"] * triton.cdiv(most_lines, lines),
        workspace.num_prefix_parts(num_rows),
        triton.cdiv(num_rows, MAX_MEMBERS),
    )
    cos, sin, angle_stride = turned
    prefix_kernel[grid](
        query_BHD, cos, sin, pool_BSW, tables, slots_B, lengths_B, spans.firsts, out_BHE,
        shared.begins, shared.members, shared.starts, shared.num_pieces,
        workspace.prefix_sums, workspace.prefix_stats, workspace.arrived, workspace.sums, workspace.stats,
        scale, *query_BHD.stride()[:2], angle_stride, *out_BHE.stride()[:2], tables.stride(0),
        Q=heads_padded, M=lines, TILE=tile, num_warps=num_warps, num_stages=num_stages, **heads,
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


def _padded(group: int) -> int:
    """Query heads a key-value head, as a program computes them."""
    return max(8, int(triton.next_power_of_2(group)))


def _decode_shape(
    num_rows: int,
    group: int,
    num_kv_heads: int,
    key_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    is_shared: bool,
) -> DecodeShape:
    """All programs should run at once: one more than there is room for takes as long as all the others. So they are the
    smaller the more pairs of a row and a key-value head there are, and where prefixes are read beside them. Chosen by
    timing on an H200 for up to eight query heads a key-value head. A program keeps a sum for each of them: with more of
    them its tiles are so small that three programs still have room, and its warps so few that Hopper's products of
    whole groups of warps are not used, which Triton before 3.7 does not let wait for what was copied."""
    heads_padded, pairs_each = _padded(group), num_rows * num_kv_heads / chip(device).num_multiprocessors
    if dtype == torch.float32 or key_dim > 128:
        return DecodeShape(32, 2 if heads_padded == 8 else 4, 2, 3)
    warps = 1 if heads_padded == 8 else 2 if heads_padded <= 32 else 4
    many = 6 if heads_padded == 8 else 3
    if is_shared:
        tile, stages, at_once = 16, 3, many
    elif pairs_each <= 1:
        tile, stages, at_once, warps = 64, 3, 2, max(2, warps)
    elif pairs_each <= 3.5:
        tile, stages, at_once = 32, 3, 3
    else:
        tile, stages, at_once = 16, 4, many
    most = max(16, _MOST_SCORES // heads_padded)
    return DecodeShape(min(tile if key_dim > 64 else 2 * tile, most), warps, stages, at_once)
