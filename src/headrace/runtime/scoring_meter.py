"""Where the scoring stage's time goes: hidden behind generation, in the open, or nothing to do.

In: when an attempt begins and ends, when a question to a source does. Out: a ``RoleStatus`` whose seconds sum to the
stage's age. A moment in which at least one question is under way is *hidden* if at least one attempt, of
any group, is being generated in it: scoring then delays nothing that was not busy anyway. Otherwise it is *exposed*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from headrace.timekeeping import SCORING_ACTIVITIES, TimeLedger
from headrace.types import RoleStatus

HIDDEN, EXPOSED, IDLE = SCORING_ACTIVITIES


class ScoringMeter:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ledger = TimeLedger(SCORING_ACTIVITIES, start=IDLE, clock=clock)
        self._num_generating = 0
        self._num_asking = 0
        self._num_answered = 0
        self._seconds: dict[str, float] = {}
        self._held_s = 0.0
        self._num_groups = 0

    def attempt_began(self) -> None:
        """Attempts come and go by the thousand, so these two are plain calls; only the first of them to come and the
        last to go can change anything here."""
        self._num_generating += 1
        if self._num_generating == 1:
            self._look()

    def attempt_ended(self) -> None:
        self._num_generating -= 1
        if self._num_generating == 0:
            self._look()

    @contextmanager
    def asking(self, source: str) -> Iterator[None]:
        """While ``source`` works on a question."""
        since = self._clock()
        self._num_asking += 1
        self._look()
        try:
            yield
            self._num_answered += 1
        finally:
            self._num_asking -= 1
            self._look()
            self._seconds[source] = self._seconds.get(source, 0.0) + self._clock() - since

    @contextmanager
    def holding(self) -> Iterator[None]:
        """While a group has all its attempts and waits for scores."""
        since = self._clock()
        try:
            yield
        finally:
            self._held_s += self._clock() - since
            self._num_groups += 1

    def status(self, counters: Mapping[str, float]) -> RoleStatus:
        return RoleStatus(
            role="scoring",
            version=0,
            progress=self._num_answered,
            seconds=self._ledger.seconds(),
            counters={
                **{f"{source}_s": seconds for source, seconds in self._seconds.items()},
                "held_s": self._held_s,
                "groups": self._num_groups,
                **counters,
            },
        )

    def _look(self) -> None:
        """What goes on now."""
        busy = HIDDEN if self._num_generating else EXPOSED
        activity = busy if self._num_asking else IDLE
        if activity != self._ledger.current:
            self._ledger.switch(activity)
