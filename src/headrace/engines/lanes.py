"""Which row of which lane each decoding sequence occupies.

In: the slots that decode and the padded length of each. Out: for every lane its rows in order, with the
moves and loads that bring its copy of keys and values up to date. Rows stay where they are while nothing
changes, so that most passes move nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.models.resident_kv import Lane

_NOWHERE = 0


@dataclass(slots=True)
class LaneRows:
    """The sequences of one lane."""

    lane: Lane
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """int64 [N], the slot of each row."""
    moves: tuple[np.ndarray, np.ndarray] | None = None
    """(to, from) rows for the coming pass."""
    loads: np.ndarray | None = None
    """Rows of the coming pass that must be loaded from their blocks."""
    room: int = 0
    """Passes after the coming one until its longest row outgrows the lane."""


class Lanes:
    def __init__(self, num_slots: int) -> None:
        self._length_of = np.full(num_slots, _NOWHERE, dtype=np.int64)
        self._tenant_of = np.full(num_slots, _NOWHERE, dtype=np.int64)
        self._lanes: dict[int, LaneRows] = {}
        self._occupied: list[LaneRows] = []
        self._num_changes = -1
        self._slots = np.zeros(0, dtype=np.int64)

    def settled(self, num_changes: int, slots: np.ndarray) -> list[LaneRows] | None:
        """The lanes as they are, if these slots are in them, none was taken or left since
        (``num_changes``), and every row still has room; None: call ``arrange``."""
        lanes = self._occupied
        if num_changes != self._num_changes or not np.array_equal(slots, self._slots):
            return None
        for rows in lanes:
            rows.moves = rows.loads = None
            rows.room -= 1
        return None if min((rows.room for rows in lanes), default=0) < 0 else lanes

    def arrange(
        self,
        slots: np.ndarray,
        tenants: np.ndarray,
        lengths: np.ndarray,
        *,
        positions: np.ndarray,
        num_changes: int,
    ) -> list[LaneRows]:
        """Lanes for these slots, shortest first; together they name each slot once. ``tenants`` tells
        one occupant of a slot from the next, ``positions`` are those of the coming pass."""
        here = (self._length_of[slots] == lengths) & (self._tenant_of[slots] == tenants)
        self._rearrange(slots, tenants, lengths, here)
        self._occupied = [rows for rows in self._lanes.values() if len(rows.slots)]
        for rows in self._occupied:
            longest = int(positions[lengths == rows.lane.kv_length].max())
            rows.room = rows.lane.kv_length - 1 - longest
        self._num_changes, self._slots = num_changes, slots
        return self._occupied

    def _rearrange(
        self, slots: np.ndarray, tenants: np.ndarray, lengths: np.ndarray, here: np.ndarray
    ) -> None:
        staying = np.full(len(self._length_of), _NOWHERE, dtype=np.int64)
        staying[slots[here]] = lengths[here]
        for length in set(lengths.tolist()) - self._lanes.keys():
            self._lanes[length] = LaneRows(Lane(length))
            self._lanes = dict(sorted(self._lanes.items()))
        for length, rows in self._lanes.items():
            _refill(rows, staying[rows.slots] == length, slots[(lengths == length) & ~here])
        self._length_of[:] = _NOWHERE
        self._length_of[slots], self._tenant_of[slots] = lengths, tenants


def _refill(rows: LaneRows, stays: np.ndarray, joining: np.ndarray) -> None:
    """Keep what stays below the new count in place; fill gaps from above it, then with what joins."""
    rows.moves = rows.loads = None
    if stays.all() and not len(joining):
        return
    count = int(stays.sum()) + len(joining)
    occupied = np.zeros(max(count, len(rows.slots)), dtype=bool)
    occupied[: len(rows.slots)] = stays
    gaps = np.flatnonzero(~occupied[:count])
    above = np.flatnonzero(occupied[count:]) + count
    slots = np.zeros(count, dtype=np.int64)
    kept = min(count, len(rows.slots))
    slots[:kept] = rows.slots[:kept]
    if len(above):
        slots[gaps[: len(above)]] = rows.slots[above]
        rows.moves = (gaps[: len(above)], above)
    if len(joining):
        slots[gaps[len(above) :]] = joining
        rows.loads = gaps[len(above) :]
    rows.slots = slots
