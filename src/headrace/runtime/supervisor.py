"""Background tasks whose failures are never lost.

``guard`` awaits the main line of a run; the first failure of a background task, or one reported with
``fail``, ends it with that error. ``close`` leaves nothing running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Supervisor:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def fail(self, error: BaseException) -> None:
        """End the main line with ``error``, unless something failed before."""
        if not self._fatal.done():
            self._fatal.set_exception(error)

    async def guard(self, coroutine: Coroutine[Any, Any, None]) -> None:
        main = asyncio.create_task(coroutine)
        try:
            await asyncio.wait({main, self._fatal}, return_when=asyncio.FIRST_COMPLETED)
            if self._fatal.done() and not main.done():
                self._fatal.result()
            await main
        finally:
            main.cancel()
            await asyncio.gather(main, return_exceptions=True)
            self._fatal.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)
