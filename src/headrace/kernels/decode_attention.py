"""Decode attention over key-value rows kept in blocks: one query row a sequence, as launches a CUDA graph can hold.

In: queries, keys and values of a pass, the pool of one layer, block tables and how many rows each query sees, all on
the device. Out: written into a tensor the caller owns; keys and values are in the pool then. Grids depend on shapes
and static limits alone.

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
from typing import Any

import torch
import triton

from headrace.kernels.chip import chip
from headrace.kernels.decode import decode_kernel
from headrace.kernels.paged_attention import angles, prefill_shape
from headrace.kernels.pool import padded_dim
from headrace.kernels.prefix import prefix_kernel
from headrace.kernels.rotation import Rotation
from headrace.kernels.shared_prefixes import MAX_MEMBERS, SharedPrefixes
from headrace.kernels.states import PART_STEP

_MAX_SPANS = 32
_MIN_SPAN = 256
"""Key-value rows below which a span is not worth a program of its own."""
_PROGRAMS_PER_MULTIPROCESSOR = 3
"""To which the key-value rows of a pass are dealt out. By timing on an H200: with fewer memory is not kept busy, with
more, which must still all run at once, beginning and ending takes longer than it spares."""
_UNEVEN_SHARES = 3
"""Of which a span is far longer than an even one: alone on its multiprocessor a program reads two to three times as
fast as beside others."""
_MOST_SCORES = 1024
"""Of a tile, one for each key and query head."""
_PREFIX_STATES = 512
"""Rows times parts of a prefix: with 8 rows a piece, about as many programs a key-value head as fill the chip."""


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Where the pieces of a decode pass leave their partial results; one serves every layer of a stream."""

    max_length: int
    """The longest sequence a row may have."""
    num_programs: int
    """To which the key-value rows of a pass are dealt out."""
    num_slots: int
    """Spans of all rows together that there is memory for."""
    sums: torch.Tensor
    stats: torch.Tensor
    arrived: torch.Tensor
    """Spans and parts that have left theirs, by row and key-value head; zero between passes."""
    num_prefix_states: int
    prefix_sums: torch.Tensor
    prefix_stats: torch.Tensor
    side: torch.cuda.Stream | None
    """Where prefixes are attended meanwhile; none where kernels are interpreted."""

    def num_spans(self, num_pairs: int) -> int:
        """Spans a row is split into at most, for this many pairs of a row and a key-value head: twice as many as an
        even length would need, for rows that are longer than others."""
        return min(triton.cdiv(2 * self.num_programs, num_pairs), self._most_spans)

    def num_uneven_spans(self, num_rows: int) -> int:
        """The same for a pass that ``is_uneven``: as many as there is memory for. Of most rows most of them are not
        used, and programs that find nothing to do cost other passes more than they spare."""
        return min(self.num_slots // num_rows, self._most_spans)

    def is_uneven(self, num_rows: int, num_kv_heads: int, longest: int, total: int) -> bool:
        """Whether the longest row, split as usual, would be read long after the others. ``longest`` and ``total``: its
        key-value rows and all rows' together, without shared prefixes."""
        num_spans = self.num_spans(num_rows * num_kv_heads)
        share = max(_MIN_SPAN, total * num_kv_heads // self.num_programs)
        return longest > _UNEVEN_SHARES * share * num_spans and self.num_uneven_spans(num_rows) > num_spans

    @property
    def _most_spans(self) -> int:
        return min(_MAX_SPANS, triton.cdiv(self.max_length, _MIN_SPAN))

    def num_prefix_parts(self, num_rows: int) -> int:
        """Parts a shared prefix is split into at most, in a pass of this many rows."""
        longest = triton.cdiv(self.max_length, PART_STEP.value)
        return min(_MAX_SPANS, self.num_prefix_states // num_rows, longest)


def decode_workspace(
    max_rows: int, num_heads: int, value_dim: int, max_length: int, device: torch.device
) -> DecodeWorkspace:
    num_programs = chip(device).num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
    # ``num_spans`` makes fewer than four times that many, or a span a row, left where it has a prefix.
    num_slots = max(max_rows, min(4 * num_programs, max_rows * _MAX_SPANS))
    num_prefix_states = max(_PREFIX_STATES, max_rows)

    def floats(count: int) -> torch.Tensor:
        return torch.empty(count * num_heads, dtype=torch.float32, device=device)

    return DecodeWorkspace(
        max_length=max_length,
        num_programs=num_programs,
        num_slots=num_slots,
        sums=floats(num_slots * value_dim),
        stats=floats(num_slots * 2),
        arrived=torch.zeros(max_rows * num_heads, dtype=torch.int32, device=device),
        num_prefix_states=num_prefix_states,
        prefix_sums=floats(num_prefix_states * value_dim),
        prefix_stats=floats(num_prefix_states * 2),
        # Its few programs come first, or they would wait for most of the others and be the tail of the pass.
        side=torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None,
    )


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
    total: torch.Tensor,
    uneven: bool = False,
    out_BHE: torch.Tensor,
    workspace: DecodeWorkspace,
) -> None:
    """One query row a sequence. ``tables`` (int32 [slots, blocks]) is read at ``slots_B``;
    ``lengths_B`` (int32) counts the key-value rows a query sees, of which the last are ``key_BKD`` and ``value_BKE``;
    it is 0 for a padding row, which gets zeros. Prefixes that are ``shared`` are read once a piece, unless a window
    makes them short anyway. Queries and keys are given before ``rotation``. ``total``: int32 [1], the sum of
    ``lengths_B`` without shared prefixes; it decides how rows are split and nothing else, and so does ``uneven``."""
    num_rows, num_heads, key_dim = query_BHD.shape
    num_kv_heads, value_dim = value_BKE.shape[1:]
    num_pairs, group = num_rows * num_kv_heads, num_heads // num_kv_heads
    num_spans = workspace.num_uneven_spans(num_rows) if uneven else workspace.num_spans(num_pairs)
    heads_padded = max(8, triton.next_power_of_2(group))
    shared = None if window else shared
    pairs_each = num_pairs / chip(query_BHD.device).num_multiprocessors
    tile, num_warps, num_stages = _decode_shape(
        key_dim, heads_padded, pool_BSW.dtype, pairs_each, shared is not None
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
        "MIN_SPAN": _MIN_SPAN,
        "PROGRAMS": workspace.num_programs,
    }
    cos, sin, angle_stride = turned = angles(rotation, query_BHD)
    attend_own = partial(
        decode_kernel[(num_kv_heads, num_spans, num_rows)],
        query_BHD, key_BKD, value_BKE, cos, sin, pool_BSW, tables, slots_B, lengths_B, total, out_BHE,
        workspace.sums, workspace.stats, workspace.arrived, lengths_B if shared is None else shared.begins,
        workspace.prefix_sums, workspace.prefix_stats, workspace.num_prefix_parts(num_rows), scale,
        *query_BHD.stride()[:2], *key_BKD.stride()[:2], *value_BKE.stride()[:2], angle_stride,
        *out_BHE.stride()[:2], tables.stride(0),
        P=heads_padded, WINDOW=window or 0, SHARED=shared is not None, TILE=tile,
        num_warps=num_warps, num_stages=num_stages, **heads,
    )  # fmt: skip
    if shared is None:
        attend_own()
        return
    attend_prefixes = partial(
        _attend_prefixes, query_BHD, turned, pool_BSW, tables, slots_B, lengths_B, total, shared, scale, out_BHE,
        workspace, heads | {"SPAN_STEP": tile}, num_spans,
    )  # fmt: skip
    _side_by_side(attend_prefixes, attend_own, workspace.side)


def _attend_prefixes(
    query_BHD: torch.Tensor,
    turned: tuple[torch.Tensor, torch.Tensor, int],
    pool_BSW: torch.Tensor,
    tables: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    total: torch.Tensor,
    shared: SharedPrefixes,
    scale: float,
    out_BHE: torch.Tensor,
    workspace: DecodeWorkspace,
    heads: dict[str, Any],
    num_spans: int,
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
        query_BHD, cos, sin, pool_BSW, tables, slots_B, lengths_B, total, out_BHE,
        shared.begins, shared.members, shared.starts, shared.num_pieces,
        workspace.prefix_sums, workspace.prefix_stats, workspace.arrived, workspace.sums, workspace.stats, num_spans,
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


def _decode_shape(
    key_dim: int, heads_padded: int, dtype: torch.dtype, pairs_each: float, is_shared: bool
) -> tuple[int, int, int]:
    """Key-value rows of a tile, warps, pipeline stages, for this many pairs of a row and a key-value head a
    multiprocessor. All programs should run at once: one more than there is room for takes as long as all the others.
    So they are the smaller the more there are, and where prefixes are read beside them. Chosen by timing on an H200 for
    up to eight query heads a key-value head. A program keeps a sum for each of them: with more of them its tiles are so
    small that three programs still have room, and its warps so few that Hopper's products of whole groups of warps are
    not used, which Triton before 3.7 does not let wait for what was copied."""
    if dtype == torch.float32 or key_dim > 128:
        return 32, 2 if heads_padded == 8 else 4, 2
    warps = 1 if heads_padded == 8 else 2 if heads_padded <= 32 else 4
    if is_shared:
        tile, stages = 16, 3
    elif pairs_each <= 1:
        tile, stages, warps = 64, 3, max(2, warps)
    elif pairs_each <= 6:
        tile, stages = 32, 3
    else:
        tile, stages = 16, 4
    most = max(16, _MOST_SCORES // heads_padded)
    return min(tile if key_dim > 64 else 2 * tile, most), warps, stages
