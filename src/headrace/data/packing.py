"""Samples -> rows of whole sequences laid end to end, close to equal in cost.

In: samples of any lengths. Out: ``PackedRow`` objects of at most ``row_tokens`` tokens; a longer sample
has a row of its own. Each sample lies in exactly one row, none is cut short or padded, and equal inputs
give equal rows. Attempts at one task begin with the same prompt: with ``share_prefixes`` such a prefix is
laid down once and its continuations refer to it. All prefixes of a row come first, then their
continuations in the same order, then the samples that share nothing.

Where samples carry routes, a prefix is shared as far as its members' routes agree: its tokens are computed once and
can be routed in one way only.

Legend: T tokens of the row, B sequences in it, S segments (prefixes, continuations, whole sequences), M
mixture-of-experts layers, K experts of a token.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.data import masks
from headrace.data.packed_routes import equally_routed, lay_routes
from headrace.data.teacher_columns import join_teachers
from headrace.types import Sample, SamplingMask, TeacherScores

NO_PARENT = -1
MIN_SAVING = 0.04
"""Share of the tokens below which sharing does not pay: a prefix's keys and values are laid out for every reader."""
ROW_COST = 384
"""Tokens that could be computed in the time a row takes besides its own: all its gradients are added to the others'."""
_NO_BOUND = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Segments laid end to end; entry t of every [T] array belongs to token t."""

    sample_index: np.ndarray
    """int64 [B], where each sequence stood in the list that was packed."""
    token_ids: np.ndarray
    """int64 [T]."""
    position_ids: np.ndarray
    """int64 [T], from 0 in each sequence, its prefix included."""
    cu_seqlens: np.ndarray
    """int64 [S + 1], where each segment begins, and the end."""
    parents: np.ndarray
    """int64 [S], the segment whose tokens come before a segment's own; -1: it begins its sequence."""
    sequence: np.ndarray
    """int64 [T], 0 to B - 1; a shared prefix counts as its first continuation's."""
    loss_mask: np.ndarray
    """bool [T]; never true on the first token of a segment, which nothing in the segment predicts."""
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
    sampling_mask: SamplingMask | None
    """A row for each token [T]; None: no sample of the row has one."""
    routes: np.ndarray | None = None
    """uint8 or uint16 [T, M, K], zeros where nothing is recorded; None: no sample of the row has a record."""
    routed: np.ndarray | None = None
    """bool [T], which tokens have a record; None: as above."""
    teacher: TeacherScores | None = None
    """Blank where a sample has no teacher; None: none of the row has."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def environment_mask(self) -> np.ndarray:
        """bool [T], tokens that were not sampled and come after ones that were: an environment wrote them. Loss tokens
        before a segment cannot be those of its sequence: what is shared ends before the first."""
        num_before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.loss_mask)])
        at_start = np.repeat(num_before[self.cu_seqlens[:-1]], np.diff(self.cu_seqlens))
        return ~self.loss_mask & (num_before[:-1] > at_start)

    @property
    def computed(self) -> np.ndarray:
        """bool [T], all tokens but the last of each sequence: nothing is predicted from that, and nothing attends
        to it."""
        computed = np.ones(self.num_tokens, dtype=bool)
        computed[self.cu_seqlens[1:][self._ends_uncomputed] - 1] = False
        return computed

    @property
    def num_computed(self) -> int:
        return self.num_tokens - int(np.count_nonzero(self._ends_uncomputed))

    @property
    def _ends_uncomputed(self) -> np.ndarray:
        """bool [S], the segments whose last token is not computed."""
        lengths = np.diff(self.cu_seqlens)
        return (np.arange(lengths.size) > self.parents.max(initial=NO_PARENT)) & (lengths > 1)

    @property
    def num_sequences(self) -> int:
        return int(self.sample_index.shape[0])


@dataclass(frozen=True, slots=True)
class Bundle:
    """Samples that stay together: they share their first ``prefix`` tokens (0: it is one sample alone)."""

    indices: tuple[int, ...]
    prefix: int = 0

    def num_tokens(self, lengths: Sequence[int]) -> int:
        return sum([lengths[i] for i in self.indices]) - self.prefix * (len(self.indices) - 1)

    def divide(self, lengths: Sequence[int], room: int) -> tuple[Bundle | None, Bundle]:
        """As many of the first samples as fit into ``room`` (None: not even two, so that nothing would be
        shared), and the others."""
        sizes = np.cumsum([lengths[i] - self.prefix for i in self.indices]) + self.prefix
        count = int(np.searchsorted(sizes, room, side="right"))
        if not self.prefix or not 2 <= count < len(self.indices):
            return None, self
        rest = self.indices[count:]
        return Bundle(self.indices[:count], self.prefix), Bundle(rest, self.prefix if len(rest) > 1 else 0)


def pack(
    samples: Sequence[Sample], *, row_tokens: int, balance_tokens: int = 4096, share_prefixes: bool = False
) -> tuple[PackedRow, ...]:
    """Rows in the order of their first samples.

    ``balance_tokens`` is the length at which attention costs as much as everything else (about six times
    the hidden size), so that a sequence of n tokens costs n + n^2 / balance_tokens. Prefixes are shared
    only where that saves enough to pay.
    """
    if row_tokens < 1:
        raise ValueError(f"row_tokens must be at least 1, not {row_tokens}")
    lengths = [sample.num_tokens for sample in samples]
    bundles = [Bundle((index,)) for index in range(len(samples))]
    if share_prefixes:
        shared = _bundles(samples, lengths, row_tokens)
        if sum(b.num_tokens(lengths) for b in shared) <= (1 - MIN_SAVING) * sum(lengths):
            bundles = shared
    rows = _assign(bundles, lengths, row_tokens=row_tokens, balance_tokens=balance_tokens)
    return tuple(pack_row(samples, row) for row in rows)


def pack_row(samples: Sequence[Sample], bundles: Sequence[Bundle]) -> PackedRow:
    """The chosen bundles laid end to end."""
    spans, parents = _spans(samples, bundles)
    lengths = np.array([stop - start for _, start, stop in spans], dtype=np.int64)
    cu_seqlens = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    num_prefixes = sum(bundle.prefix > 0 for bundle in bundles)
    sample_index = np.array([index for index, _, _ in spans[num_prefixes:]], dtype=np.int64)
    place = {int(index): b for b, index in enumerate(sample_index)}
    starts = np.array([start for _, start, _ in spans], dtype=np.int64)
    temperatures = np.array([samples[index].temperature for index, _, _ in spans], dtype=np.float32)

    def join(field: Callable[[Sample], np.ndarray], dtype: type) -> np.ndarray:
        pieces = [field(samples[index])[start:stop] for index, start, stop in spans]
        return np.concatenate(pieces, dtype=dtype, casting="unsafe")

    loss_mask = join(lambda sample: sample.loss_mask, bool)
    loss_mask[cu_seqlens[:-1]] = False
    complete = all(samples[index].ref_logprobs is not None for index in sample_index)
    routes, routed = lay_routes(samples, spans, cu_seqlens)
    return PackedRow(
        sample_index=sample_index,
        token_ids=join(lambda sample: sample.token_ids, np.int64),
        position_ids=np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - starts, lengths),
        cu_seqlens=cu_seqlens,
        parents=np.array(parents, dtype=np.int64),
        sequence=np.repeat(np.array([place[index] for index, _, _ in spans], dtype=np.int64), lengths),
        loss_mask=loss_mask,
        behavior_logprobs=join(lambda sample: sample.behavior_logprobs, np.float32),
        versions=join(lambda sample: sample.versions, np.int32),
        advantages=join(lambda sample: sample.advantages, np.float32),
        temperatures=np.repeat(temperatures, lengths),
        ref_logprobs=join(_ref_logprobs, np.float32) if complete else None,
        sampling_mask=_joined_mask(samples, spans),
        routes=routes,
        routed=routed,
        teacher=join_teachers(samples, spans),
    )


def _ref_logprobs(sample: Sample) -> np.ndarray:
    assert sample.ref_logprobs is not None
    return sample.ref_logprobs


def _joined_mask(samples: Sequence[Sample], spans: Sequence[tuple[int, int, int]]) -> SamplingMask | None:
    kept = [(samples[index].sampling_mask, start, stop) for index, start, stop in spans]
    if all(mask is None for mask, _, _ in kept):
        return None
    return masks.join(
        [
            masks.whole(stop - start) if mask is None else masks.cut(mask, start, stop)
            for mask, start, stop in kept
        ]
    )


def _spans(
    samples: Sequence[Sample], bundles: Sequence[Bundle]
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """(sample, start, stop) of every segment in row order, and the segments' parents."""
    sharing = [bundle for bundle in bundles if bundle.prefix]
    spans = [(bundle.indices[0], 0, bundle.prefix) for bundle in sharing]
    parents = [NO_PARENT] * len(sharing)
    for parent, bundle in enumerate(sharing):
        spans += [(index, bundle.prefix, samples[index].num_tokens) for index in bundle.indices]
        parents += [parent] * len(bundle.indices)
    alone = [index for bundle in bundles if not bundle.prefix for index in bundle.indices]
    spans += [(index, 0, samples[index].num_tokens) for index in alone]
    return spans, parents + [NO_PARENT] * len(alone)


def _bundles(samples: Sequence[Sample], lengths: Sequence[int], row_tokens: int) -> list[Bundle]:
    """Attempts at one task with one prompt together, in bundles that fit into a row."""
    members: dict[tuple[int, bytes], list[int]] = {}
    for index, sample in enumerate(samples):
        shown = sample.token_ids[: _prefix_tokens(sample)]
        members.setdefault((sample.group, shown.tobytes()), []).append(index)
    bundles: list[Bundle] = []
    for first, *others in (alike for whole in members.values() for alike in _alike(samples, whole)):
        bundle = Bundle((first,))
        for index in others:
            leader = samples[bundle.indices[0]]
            most = bundle.prefix or _prefix_tokens(leader)
            prefix = equally_routed(leader, samples[index], most)
            larger = Bundle((*bundle.indices, index), prefix)
            if 0 < most <= 2 * prefix and larger.num_tokens(lengths) <= row_tokens:
                bundle = larger
            else:
                bundles.append(bundle)
                bundle = Bundle((index,))
        bundles.append(bundle)
    return bundles


def _alike(samples: Sequence[Sample], indices: Sequence[int]) -> list[list[int]]:
    """Samples with one prompt, apart where its routes differ in the first half already."""
    num_tokens = _prefix_tokens(samples[indices[0]])
    apart: list[list[int]] = []
    for index in indices:
        for alike in apart:
            if num_tokens <= 2 * equally_routed(samples[alike[0]], samples[index], num_tokens):
                alike.append(index)
                break
        else:
            apart.append([index])
    return apart


def _prefix_tokens(sample: Sample) -> int:
    """Tokens before the one that predicts the first loss token, which each attempt keeps for itself."""
    return max(int(sample.loss_mask.argmax()) - 1, 0)


def _assign(
    bundles: Sequence[Bundle], lengths: Sequence[int], *, row_tokens: int, balance_tokens: int
) -> list[list[Bundle]]:
    """Bundles by row, all whole, or some divided over rows that their parts fill up, whichever costs less: a divided
    bundle's prefix is computed once more, and whole ones may need more rows."""
    ways = (False, True) if any(bundle.prefix for bundle in bundles) else (False,)
    found = [
        _fill(_OpenRows(lengths, row_tokens, balance_tokens), bundles, dividing=dividing) for dividing in ways
    ]

    def cost(rows: Sequence[Sequence[Bundle]]) -> int:
        return ROW_COST * len(rows) + sum(bundle.num_tokens(lengths) for row in rows for bundle in row)

    return min(found, key=cost)


def _fill(open_rows: _OpenRows, bundles: Sequence[Bundle], *, dividing: bool) -> list[list[Bundle]]:
    """The costliest into the cheapest row that has room."""
    open_rows.open_for(bundles, dividing=dividing)
    waiting = [(-open_rows.size(bundle), bundle.indices, bundle) for bundle in bundles]
    heapq.heapify(waiting)
    while waiting:
        _, _, bundle = heapq.heappop(waiting)
        rest = open_rows.place(bundle, dividing=dividing)
        if rest is not None:
            heapq.heappush(waiting, (-open_rows.size(rest), rest.indices, rest))
    rows = [sorted(row, key=lambda bundle: bundle.indices) for row in open_rows.rows if row]
    return sorted(rows, key=lambda row: row[0].indices)


class _OpenRows:
    """Rows that are being filled."""

    def __init__(self, lengths: Sequence[int], row_tokens: int, balance_tokens: int) -> None:
        self.rows: list[list[Bundle]] = []
        self._rooms = np.zeros(0, dtype=np.int64)
        """Of an empty row without bound: a sample that is longer than rows may be has one to itself."""
        self._costs = np.zeros(0)
        self._lengths, self._row_tokens, self._balance_tokens = lengths, row_tokens, balance_tokens

    def size(self, bundle: Bundle) -> int:
        return bundle.num_tokens(self._lengths)

    def open_for(self, bundles: Sequence[Bundle], *, dividing: bool) -> None:
        """As many rows as first-fit decreasing needs, or, where bundles are divided, as many as their tokens fill."""
        sizes = sorted(map(self.size, bundles), reverse=True)
        filled = math.ceil(sum(sizes) / self._row_tokens)
        self.add(filled if dividing else _first_fit_rows(sizes, self._row_tokens))

    def add(self, count: int = 1) -> None:
        self.rows += [[] for _ in range(count)]
        self._rooms = np.append(self._rooms, np.full(count, _NO_BOUND))
        self._costs = np.append(self._costs, np.zeros(count))

    def place(self, bundle: Bundle, *, dividing: bool) -> Bundle | None:
        """Put a bundle, or a part of it, into a row; returns the rest."""
        size = self.size(bundle)
        fitting = np.flatnonzero(self._rooms >= size)
        if fitting.size:
            self._put(int(fitting[self._costs[fitting].argmin()]), bundle)
            return None
        roomiest = int(self._rooms.argmax())
        part, rest = bundle.divide(self._lengths, int(self._rooms[roomiest])) if dividing else (None, bundle)
        if part is None:
            self.add()
            self._put(len(self.rows) - 1, bundle)
            return None
        self._put(roomiest, part)
        return rest

    def _put(self, row: int, bundle: Bundle) -> None:
        size = self.size(bundle)
        self._rooms[row] = (self._rooms[row] if self.rows[row] else self._row_tokens) - size
        self.rows[row].append(bundle)
        self._costs[row] += size + sum(self._lengths[i] ** 2 for i in bundle.indices) / self._balance_tokens


def _first_fit_rows(lengths: Sequence[int], row_tokens: int) -> int:
    """How many rows first-fit needs for lengths in falling order."""
    # As many rows as there can be, all of them empty: what is longer than a row fills one.
    rooms, num_rows = np.full(len(lengths), row_tokens), 0
    for length in (min(length, row_tokens) for length in lengths):
        row = int((rooms[: num_rows + 1] >= length).argmax())
        rooms[row] -= length
        num_rows = max(num_rows, row + 1)
    return num_rows
