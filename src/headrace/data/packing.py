"""Samples -> rows of whole sequences laid end to end, close to equal in cost.

In: samples of any lengths. Out: ``PackedRow`` objects of at most ``row_tokens`` tokens; a longer sample
has a row of its own. No sample is cut, padded or reordered inside a row, each lies in exactly one row,
and equal inputs give equal rows.

Legend: T tokens of the row, B sequences in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Sequences laid end to end; entry t of every [T] array belongs to token t."""

    sample_index: np.ndarray
    """int64 [B], where each sequence stood in the list that was packed."""
    token_ids: np.ndarray
    """int64 [T]."""
    position_ids: np.ndarray
    """int64 [T], from 0 in each sequence."""
    cu_seqlens: np.ndarray
    """int64 [B + 1], where each sequence begins, and the end."""
    sequence: np.ndarray
    """int64 [T], 0 to B - 1."""
    loss_mask: np.ndarray
    """bool [T]; never true on the first token of a sequence, which nothing predicts."""
    behavior_logprobs: np.ndarray
    """float32 [T]."""
    versions: np.ndarray
    """int32 [T]."""
    advantages: np.ndarray
    """float32 [T]."""
    temperatures: np.ndarray
    """float32 [T]."""
    ref_logprobs: np.ndarray | None
    """float32 [T]; None unless every sample of the row carries them."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.sample_index.shape[0])


def pack(samples: Sequence[Sample], *, row_tokens: int, balance_tokens: int = 4096) -> tuple[PackedRow, ...]:
    """Rows in the order of their first samples.

    ``balance_tokens`` is the length at which attention costs as much as everything else (about six times
    the hidden size), so that a sequence of n tokens costs n + n^2 / balance_tokens.
    """
    if row_tokens < 1:
        raise ValueError(f"row_tokens must be at least 1, not {row_tokens}")
    lengths = [sample.num_tokens for sample in samples]
    rows = _assign(lengths, row_tokens=row_tokens, balance_tokens=balance_tokens)
    return tuple(pack_row(samples, indices) for indices in rows)


def pack_row(samples: Sequence[Sample], indices: Sequence[int]) -> PackedRow:
    """The chosen samples laid end to end."""
    chosen = [samples[index] for index in indices]
    lengths = np.array([sample.num_tokens for sample in chosen], dtype=np.int64)
    cu_seqlens = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    loss_mask = _join(chosen, lambda sample: sample.loss_mask, bool)
    loss_mask[cu_seqlens[:-1]] = False
    refs = [sample.ref_logprobs for sample in chosen]
    return PackedRow(
        sample_index=np.asarray(indices, dtype=np.int64),
        token_ids=_join(chosen, lambda sample: sample.token_ids, np.int64),
        position_ids=np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths),
        cu_seqlens=cu_seqlens,
        sequence=np.repeat(np.arange(len(chosen)), lengths),
        loss_mask=loss_mask,
        behavior_logprobs=_join(chosen, lambda sample: sample.behavior_logprobs, np.float32),
        versions=_join(chosen, lambda sample: sample.versions, np.int32),
        advantages=_join(chosen, lambda sample: sample.advantages, np.float32),
        temperatures=np.repeat(np.array([s.temperature for s in chosen], dtype=np.float32), lengths),
        ref_logprobs=np.concatenate([r for r in refs if r is not None]).astype(np.float32)
        if all(r is not None for r in refs)
        else None,
    )


def _join(samples: Sequence[Sample], field: Callable[[Sample], np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([field(sample) for sample in samples]).astype(dtype)


def _assign(lengths: Sequence[int], *, row_tokens: int, balance_tokens: int) -> list[list[int]]:
    """Indices by row: as few rows as first-fit decreasing needs, then the costliest sample into the
    cheapest row that has room."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_rows = _first_fit_rows([lengths[i] for i in order], row_tokens)
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    tokens, costs = [0] * num_rows, [0.0] * num_rows
    for index in order:
        length = lengths[index]
        open_rows = [r for r in range(len(rows)) if not rows[r] or tokens[r] + length <= row_tokens]
        if not open_rows:
            rows.append([])
            tokens.append(0)
            costs.append(0.0)
            open_rows = [len(rows) - 1]
        best = min(open_rows, key=lambda r: (costs[r], r))
        rows[best].append(index)
        tokens[best] += length
        costs[best] += length + length * length / balance_tokens
    return sorted(sorted(row) for row in rows if row)


def _first_fit_rows(lengths: Sequence[int], row_tokens: int) -> int:
    """How many rows first-fit needs for lengths in falling order."""
    room: list[int] = []
    for length in lengths:
        fitting = next((r for r, free in enumerate(room) if free >= length), None)
        if fitting is None:
            room.append(max(row_tokens - length, 0))
        else:
            room[fitting] -= length
    return len(room)
