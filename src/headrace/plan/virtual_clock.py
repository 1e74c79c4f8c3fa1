"""An event loop whose time moves only when everything waits: hours of simulated work in milliseconds.

``run(coroutine)`` is ``asyncio.run`` on such a loop. Timers fire in order, at exactly their times, and
two runs of the same program interleave in the same way. Work on threads or sockets has no place here:
a program that waits for something no timer will bring is reported instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpSelector(selectors.SelectSelector):
    """Where a real loop would sleep, moves the clock instead."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("virtual clock: every task waits and no timer is set: nothing can happen")
        self.skipped_s += max(timeout, 0.0)
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Starts at time 0; ``time()`` is the virtual clock."""

    def __init__(self) -> None:
        self._jump_selector = _JumpSelector()
        super().__init__(self._jump_selector)

    def time(self) -> float:
        return self._jump_selector.skipped_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to completion on a fresh virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
