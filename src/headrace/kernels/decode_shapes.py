"""How large the programs of a decode pass are, and how many of them run at the same time.

In: rows, heads and dtype of a pass, and the chip. Out: tiles, warps and pipeline of the kernels that attend rows to
what they have for themselves, and to the prefixes they share. Chosen by timing on an H200 (docs/kernels.md), or by what
they compile to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from headrace.kernels.chip import Chip
from headrace.kernels.paged_attention import prefill_shape

MOST_AT_ONCE = 6
"""Programs a multiprocessor of any ``DecodeShape``."""
_MOST_SCORES = 1024
"""Of a tile, one for each key and query head."""


class DecodeShape(NamedTuple):
    """Of the programs of a pass."""

    tile: int
    """Key-value rows."""
    num_warps: int
    num_stages: int
    """Of the pipeline."""
    num_at_once: int
    """To which the key-value rows are dealt out, for each multiprocessor; no more than there is room for."""


class PrefixShape(NamedTuple):
    """Of the programs that attend rows to what they share, by themselves or beside those of a ``DecodeShape``."""

    lines: int
    """Query heads of all members, at most."""
    tile: int
    num_warps: int
    num_stages: int
    most_registers: int | None = None
    """Of a thread; None: as many as it takes."""
    num_at_once: int | None = None
    """For each multiprocessor, at most: the fewer they are, the more room they leave. None: one for every piece."""


def prefix_shape(key_dim: int, dtype: torch.dtype, *, is_alone: bool) -> PrefixShape:
    """As for prompts, which are computed with nothing beside them. Where there is, half of each multiprocessor is left
    to it."""
    shape = PrefixShape(*prefill_shape(key_dim, dtype))
    return shape if is_alone else shape._replace(num_at_once=1)


def decode_shape(
    num_rows: int,
    group: int,
    num_kv_heads: int,
    key_dim: int,
    dtype: torch.dtype,
    chip: Chip,
    *,
    is_shared: bool,
) -> DecodeShape:
    """All programs should run at once: one more than there is room for takes as long as all the others. So they are the
    smaller the more pairs of a row and a key-value head there are, and where prefixes are read beside them. Chosen by
    timing for up to eight query heads a key-value head. A program keeps a sum for each of them: with more of them its
    tiles are so small that three programs still have room, two of four warps where prefixes are read beside them, and
    its warps so few that Hopper's products of whole groups of warps are not used, which Triton before 3.7 does not let
    wait for what was copied."""
    heads_padded, pairs_each = padded_heads(group), num_rows * num_kv_heads / chip.num_multiprocessors
    if dtype == torch.float32 or key_dim > 128:
        return DecodeShape(32, 2 if heads_padded == 8 else 4, 2, 3)
    warps = 1 if heads_padded == 8 else 2 if heads_padded <= 32 else 4
    many = 6 if heads_padded == 8 else 3
    if is_shared:
        tile, stages, at_once = 16, 2 if warps == 1 else 3, many if warps < 4 else 2
    elif pairs_each <= 1:
        tile, stages, at_once, warps = 64, 3, 2, max(2, warps)
    elif pairs_each <= 3.5:
        tile, stages, at_once = 32, 3, 3
    else:
        tile, stages, at_once = 16, 4, many
    most = max(16, _MOST_SCORES // heads_padded)
    return DecodeShape(min(tile if key_dim > 64 else 2 * tile, most), warps, stages, at_once)


def padded_heads(group: int) -> int:
    """Query heads a key-value head, as a program computes them."""
    return max(8, int(triton.next_power_of_2(group)))
