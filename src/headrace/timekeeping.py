"""Law two: no second unaccounted for.

A ``TimeLedger`` belongs to one worker. At any moment the worker is in exactly one named activity, and
``switch`` charges the time since the last switch to the activity that ends. Seconds by activity
therefore sum to the worker's age by construction. The clock is injected: ``time.perf_counter`` in
real runs, the event loop's clock under simulation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

ENGINE_ACTIVITIES = ("loading", "prefill", "decode", "idle-no-work", "paused-for-weights")
TRAINER_ACTIVITIES = (
    "loading",
    "forward-backward",
    "optimizer",
    "waiting-for-batch",
    "publishing",
    "checkpoint",
)
CONTROLLER_ACTIVITIES = ("loading", "working", "waiting")
SCORING_ACTIVITIES = ("scoring-hidden", "scoring-exposed", "idle-no-work")


class TimeLedger:
    """Charges every moment of a worker's wall time to one activity.

    A worker thread may switch while the event loop asks for a report, hence the lock.
    """

    def __init__(
        self,
        activities: tuple[str, ...],
        *,
        start: str = "loading",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert start in activities, start
        self._seconds = dict.fromkeys(activities, 0.0)
        self._clock = clock
        self._since = clock()
        self._current = start
        self._lock = threading.Lock()

    @property
    def current(self) -> str:
        return self._current

    def now(self) -> float:
        """On the clock that is charged."""
        return self._clock()

    def switch(self, activity: str) -> None:
        """End the current activity now and begin another."""
        with self._lock:
            self._charge(activity)

    @contextmanager
    def activity(self, activity: str) -> Iterator[None]:
        """Charge the enclosed time to ``activity``, then return to what was going on before."""
        before = self._current
        self.switch(activity)
        try:
            yield
        finally:
            self.switch(before)

    def split(self, shares: Mapping[str, float], then: str) -> None:
        """End the current span and divide it by weight, for a pass that mixes two activities."""
        total = sum(shares.values())
        assert total > 0, "a span must be charged to something"
        with self._lock:
            span = self._end_span(then)
            for activity, share in shares.items():
                self._seconds[activity] += span * share / total

    def seconds(self) -> dict[str, float]:
        """Seconds by activity up to now; they sum to the worker's age."""
        with self._lock:
            self._charge(self._current)
            return dict(self._seconds)

    def _charge(self, then: str) -> None:
        current = self._current
        self._seconds[current] += self._end_span(then)

    def _end_span(self, then: str) -> float:
        """Seconds since the last switch."""
        assert then in self._seconds, f"unknown activity {then!r}"
        since, self._since, self._current = self._since, self._clock(), then
        return self._since - since
