"""Law two: no second unaccounted for.

A ``TimeLedger`` belongs to one worker. At any moment the worker is in exactly one named activity, and
``switch`` charges the time since the last switch to the activity that ends. Seconds by activity
therefore sum to the worker's age by construction. The clock is injected: ``time.perf_counter`` in
real runs, the event loop's clock under simulation.
"""

from __future__ import annotations

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


class TimeLedger:
    """Charges every moment of a worker's wall time to one activity."""

    def __init__(
        self,
        activities: tuple[str, ...],
        *,
        start: str = "loading",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seconds = dict.fromkeys(activities, 0.0)
        self._clock = clock
        self._since = clock()
        self._current = start
        assert start in self._seconds, start

    @property
    def current(self) -> str:
        return self._current

    def switch(self, activity: str) -> None:
        """End the current activity now and begin another."""
        assert activity in self._seconds, f"unknown activity {activity!r}"
        now = self._clock()
        self._seconds[self._current] += now - self._since
        self._since, self._current = now, activity

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
        now, total = self._clock(), sum(shares.values())
        assert total > 0, "a span must be charged to something"
        for activity, share in shares.items():
            self._seconds[activity] += (now - self._since) * share / total
        self._since, self._current = now, then

    def seconds(self) -> dict[str, float]:
        """Seconds by activity up to now; they sum to the worker's age."""
        self.switch(self._current)
        return dict(self._seconds)
