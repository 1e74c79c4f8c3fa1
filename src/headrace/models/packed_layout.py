"""Where the segments of a packed row lie, for the attention that computes them.

In: lengths of segments in row order, and which segment each one continues. Out: a ``PackedLayout``: bounds for
the flash kernel on a GPU, and rectangles of whole sequences of like length, in which a shared prefix
stands once for each of its continuations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from headrace.models.shared_prefix import SegmentBounds, segment_bounds
from headrace.models.uploads import to_device

_MIN_SPLIT_TOKENS = 64
"""Below this length padding costs less than another kernel launch."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Sequences of a row that are padded to one length."""

    num_sequences: int
    length: int
    tokens: torch.Tensor
    """int64, row positions of the tokens, sequence by sequence; those of a shared prefix repeat."""
    cells: torch.Tensor
    """int64, the same tokens' cells of the flattened [B, L] rectangle."""
    out_tokens: torch.Tensor
    """int64, the row positions whose output is taken from here: ``tokens``, each prefix in one place."""
    out_cells: torch.Tensor
    """int64, their cells."""

    @property
    def repeats(self) -> bool:
        return self.out_tokens is not self.tokens


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the segments of a row lie, and the rectangles they are computed in."""

    num_tokens: int
    lay_rectangles: Callable[[], tuple[Rectangle, ...]]
    """Made when they are first asked for: the flash kernel does without."""
    bounds: SegmentBounds | None
    """For the flash kernel; None where there is none."""

    @property
    def rectangles(self) -> tuple[Rectangle, ...]:
        return self.lay_rectangles()

    @property
    def is_one_block(self) -> bool:
        """True when the row already is one rectangle: equal lengths, nothing to move."""
        return len(self.rectangles) == 1 and self.num_tokens == (
            self.rectangles[0].num_sequences * self.rectangles[0].length
        )


def build_layout(
    lengths: Sequence[int] | np.ndarray,
    parents: Sequence[int] | np.ndarray | None = None,
    *,
    device: torch.device | str = "cpu",
) -> PackedLayout:
    """The layout of segments with these lengths, in row order; ``parents`` as in ``PackedRow``."""
    segments = np.asarray(lengths, dtype=np.int64)
    parents_ = np.full(segments.shape, -1) if parents is None else np.asarray(parents, dtype=np.int64)
    on_gpu = torch.device(device).type == "cuda"
    return PackedLayout(
        num_tokens=int(segments.sum()),
        lay_rectangles=cache(partial(_rectangles, segments, parents_, device)),
        bounds=segment_bounds(segments, parents_, device=device) if on_gpu else None,
    )


def _rectangles(
    segments: np.ndarray, parents: np.ndarray, device: torch.device | str
) -> tuple[Rectangle, ...]:
    """Whole sequences by like length."""
    leaves = np.arange(int(parents.max(initial=-1)) + 1, segments.size)
    starts, parents_L = np.cumsum(segments) - segments, parents[leaves]
    prefixes = np.where(parents_L < 0, 0, segments[parents_L])
    _, first_leaves = np.unique(parents_L, return_index=True)
    repeated = prefixes.copy()
    repeated[first_leaves] = 0
    sequences = _Sequences(
        lengths=segments[leaves] + prefixes,
        starts=starts[leaves],
        prefixes=prefixes,
        prefix_starts=starts[parents_L],
        repeated=repeated,
    )
    return tuple(_rectangle(sequences, group, device) for group in _alike(sequences.lengths))


def _alike(lengths: np.ndarray) -> list[np.ndarray]:
    """Indices in groups within which padding stays small."""
    groups: list[list[int]] = []
    longest = 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        if groups and (longest <= _MIN_SPLIT_TOKENS or lengths[index] * 4 >= longest * 3):
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = int(lengths[index])
    return [np.array(sorted(group)) for group in groups]


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Whole sequences of a row, all arrays int64 with an entry for each."""

    lengths: np.ndarray
    starts: np.ndarray
    """Row position of the first token after the prefix."""
    prefixes: np.ndarray
    prefix_starts: np.ndarray
    repeated: np.ndarray
    """Leading tokens whose output is another sequence's to give."""


def _rectangle(sequences: _Sequences, group: np.ndarray, device: torch.device | str) -> Rectangle:
    sizes, longest = sequences.lengths[group], int(sequences.lengths[group].max())

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(values[group], sizes)

    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    prefixes = spread(sequences.prefixes)
    own = within - prefixes + spread(sequences.starts)
    tokens = np.where(within < prefixes, within + spread(sequences.prefix_starts), own)
    cells = within + np.repeat(np.arange(group.size) * longest, sizes)

    tokens_, cells_ = to_device(tokens, device), to_device(cells, device)
    out_tokens, out_cells = tokens_, cells_
    if sequences.prefixes.any():
        kept = within >= spread(sequences.repeated)
        out_tokens, out_cells = to_device(tokens[kept], device), to_device(cells[kept], device)
    return Rectangle(int(group.size), longest, tokens_, cells_, out_tokens, out_cells)
