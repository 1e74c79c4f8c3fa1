"""The controller's event loop, which knows where its own time goes.

An event loop either runs callbacks or waits in its selector, so charging the two sides of ``select`` to
a ledger accounts for every moment of the controller: ``working`` and ``waiting``, and both are ``loading`` until
whoever starts the workers says that they are there. While the loop is open, the
garbage collector leaves alone what was there before it (modules, tasks), most of what it would walk, and looks at the
rest seldom: what comes and goes with an attempt holds no cycles and is freed without it.
"""

from __future__ import annotations

import asyncio
import gc
import selectors

from headrace.timekeeping import CONTROLLER_ACTIVITIES, TimeLedger
from headrace.types import RoleStatus

_SELDOM = 100_000
"""Objects more than at the last look, before the garbage collector looks again: those of some thousand attempts. Where
a step has fewer, it hardly ever looks: they are gone again before so many more have come."""


class _MeteredSelector(selectors.DefaultSelector):
    def __init__(self, ledger: TimeLedger) -> None:
        super().__init__()
        self._ledger = ledger

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0 or self._ledger.current == "loading":
            # Callbacks are due: this only looks, and looking is work. Waiting for workers to start is loading.
            return super().select(timeout)
        self._ledger.switch("waiting")
        try:
            return super().select(timeout)
        finally:
            self._ledger.switch("working")


class ControllerLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._ledger = TimeLedger(CONTROLLER_ACTIVITIES, start="loading")
        super().__init__(_MeteredSelector(self._ledger))
        gc.freeze()
        self._gc_thresholds = gc.get_threshold()
        gc.set_threshold(_SELDOM, *self._gc_thresholds[1:])

    def close(self) -> None:
        gc.set_threshold(*self._gc_thresholds)
        gc.unfreeze()
        super().close()

    def loaded(self) -> None:
        """The workers are there: what is charged to ``loading`` ends."""
        self._ledger.switch("working")

    def status(self) -> RoleStatus:
        return RoleStatus(role="controller", version=0, progress=0, seconds=self._ledger.seconds())
