"""Rows of kept tokens (``SamplingMask``): cut, chosen and joined without touching an id.

In: masks with a row for each token of their owner. Out: masks of other owners, row by row the same sets. An empty
row means that the whole vocabulary was kept there, so tokens that were never sampled have empty rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.types import SamplingMask


def whole(num_tokens: int) -> SamplingMask:
    """Of tokens that were drawn from the whole vocabulary, or not drawn at all."""
    return SamplingMask(token_ids=np.zeros(0, np.int32), offsets=np.zeros(num_tokens + 1, np.int64))


def cut(mask: SamplingMask, start: int, stop: int) -> SamplingMask:
    """Rows ``start`` to ``stop``."""
    offsets = mask.offsets[start : stop + 1]
    return SamplingMask(token_ids=mask.token_ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])


def join(parts: Sequence[SamplingMask]) -> SamplingMask:
    """The rows of all parts, in order."""
    counts = [np.diff(part.offsets) for part in parts]
    offsets = np.cumsum(np.concatenate([np.zeros(1, np.int64), *counts]), dtype=np.int64)
    token_ids = [part.token_ids for part in parts]
    return SamplingMask(token_ids=np.concatenate([np.zeros(0, np.int32), *token_ids]), offsets=offsets)


def rows_at(mask: SamplingMask, rows: np.ndarray) -> SamplingMask:
    """The chosen rows, in the order they are named."""
    counts = np.diff(mask.offsets)[rows]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    # Entry s of the result is as far into its row as it is behind the row's first entry.
    places = np.arange(offsets[-1]) + np.repeat(mask.offsets[:-1][rows] - offsets[:-1], counts)
    return SamplingMask(token_ids=mask.token_ids[places], offsets=offsets)


def below(mask: SamplingMask, vocab_size: int) -> SamplingMask:
    """The sets without the ids from ``vocab_size`` on; none may be left empty by that."""
    known = mask.token_ids < vocab_size
    kept_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(known)])
    return SamplingMask(token_ids=mask.token_ids[known], offsets=kept_before[mask.offsets])


def fault(mask: SamplingMask, token_ids: np.ndarray, *, vocab_size: int | None = None) -> str | None:
    """What is wrong with the kept sets of these tokens; None: nothing. A remedy is the caller's to name."""
    offsets, ids = mask.offsets, mask.token_ids
    if len(offsets) != len(token_ids) + 1:
        return f"it has {len(offsets) - 1} rows for {len(token_ids)} tokens"
    counts = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(ids) or (counts < 0).any():
        return f"its offsets do not divide its {len(ids)} ids into rows"
    if len(ids) and (ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size)):
        bound = "" if vocab_size is None else f" of {vocab_size}"
        return f"it holds the ids {ids.min()} to {ids.max()}, some outside the vocabulary{bound}"
    if _has_doubles(mask):
        return "a row holds an id twice"
    cut_rows = np.flatnonzero(counts)
    if len(cut_rows):
        is_sampled = np.repeat(token_ids, counts) == ids
        found = np.logical_or.reduceat(is_sampled, offsets[:-1][cut_rows])
        if not found.all():
            row = int(cut_rows[found.argmin()])
            return f"row {row} does not hold the sampled token {token_ids[row]}"
    return None


def _has_doubles(mask: SamplingMask) -> bool:
    ids, offsets = mask.token_ids, mask.offsets
    rises = ids[1:] > ids[:-1]
    # From the last id of one row to the first of the next anything may happen.
    ends = offsets[1:-1]
    rises[ends[(ends > 0) & (ends < len(ids))] - 1] = True
    if rises.all():
        return False
    # Engines list a row in rising order; only another order is worth a search.
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return len(np.unique((rows << 32) + ids)) < len(ids)


def widest_row(mask: SamplingMask) -> tuple[int, int]:
    """Where the most ids were kept, and how many."""
    counts = np.diff(mask.offsets)
    row = int(counts.argmax()) if len(counts) else 0
    return row, int(counts.max(initial=0))
