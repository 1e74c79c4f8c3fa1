"""Where the scoring stage's time goes: hidden behind generation, in the open, or nothing to do.

In: when an attempt begins and ends, when a question to a source does. Out: a ``RoleStatus`` whose seconds sum to the
stage's age. A moment in which at least one question is under way is *hidden* if at least one attempt, of
any group, is being generated in it: scoring then delays nothing that was not busy anyway. Otherwise it is *exposed*,
and so is every source that has a question under way in it: ``SOURCE_exposed_s`` of the counters says who holds groups
up, however many questions it takes at once.
"""

from __future__ import annotations

from collections import Counter
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
        self._asking: Counter[str] = Counter()
        """Questions under way, by source; a source without any is not in it."""
        self._num_answered = 0
        self._seconds: dict[str, float] = {}
        self._exposed: dict[str, float] = {}
        self._charged = clock()
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
        self._charge_sources()
        self._asking[source] += 1
        self._look()
        try:
            yield
            self._num_answered += 1
        finally:
            self._charge_sources()
            self._asking[source] -= 1
            if not self._asking[source]:
                del self._asking[source]
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
        self._charge_sources()
        return RoleStatus(
            role="scoring",
            version=0,
            progress=self._num_answered,
            seconds=self._ledger.seconds(),
            counters={
                **{f"{source}_s": seconds for source, seconds in self._seconds.items()},
                **{f"{source}_exposed_s": seconds for source, seconds in self._exposed.items()},
                "held_s": self._held_s,
                "groups": self._num_groups,
                **counters,
            },
        )

    def _look(self) -> None:
        """What goes on now."""
        busy = HIDDEN if self._num_generating else EXPOSED
        activity = busy if self._asking else IDLE
        if activity != self._ledger.current:
            self._charge_sources()
            self._ledger.switch(activity)

    def _charge_sources(self) -> None:
        """Before anything changes: the time since the last change is that of the sources asked in it, if it was
        exposed."""
        since, self._charged = self._charged, self._clock()
        if self._ledger.current == EXPOSED:
            for source in self._asking:
                self._exposed[source] = self._exposed.get(source, 0.0) + self._charged - since
