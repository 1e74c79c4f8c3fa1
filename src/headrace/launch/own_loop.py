"""Coroutines run to their end from ordinary code, also where an event loop runs already, as in a notebook.

In: a function that makes a coroutine. Out: what it returns. A loop that runs already is left alone: the work gets a
thread and a loop of its own, and whoever called waits for it. An interrupt (Ctrl-C) cancels the work, and is raised
once it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from threading import Event, Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run(work: Callable[[], Coroutine[Any, Any, T]], loop_factory: LoopFactory | None = None) -> T:
    if _is_in_loop():
        return _Beside(work, loop_factory).wait()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(work())


class _Beside(Generic[T]):
    """Work on a thread of its own. An interrupt may come at any moment, also while the thread is being started."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]], loop_factory: LoopFactory | None) -> None:
        self._work = work
        self._loop_factory = loop_factory
        self._begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
        self._stopped = Event()
        self._outcome: Future[T] = Future()
        self._thread = Thread(target=self._run, name="headrace", daemon=True)

    def wait(self) -> T:
        try:
            self._thread.start()
            return self._outcome.result()
        except KeyboardInterrupt:
            self._stopped.set()
            for loop, task in self._begun:
                # A loop that is closed by now has nothing left to cancel.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(task.cancel)
            if self._thread.is_alive():
                # What closes workers has deadlines; a second interrupt ends this wait too.
                self._thread.join()
            raise

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._loop_factory) as runner:
                made = runner.run(self._noted())
        except BaseException as error:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(made)

    async def _noted(self) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._begun.append((asyncio.get_running_loop(), task))
        if self._stopped.is_set():
            raise asyncio.CancelledError
        return await self._work()


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
