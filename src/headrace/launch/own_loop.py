"""Coroutines run to their end from ordinary code, also where an event loop runs already, as in a notebook.

In: a function that makes a coroutine. Out: what it returns. A loop that runs already is left alone: the work gets a
thread and a loop of its own, and whoever called waits for it. An interrupt (Ctrl-C) cancels the work, and is raised
once it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run(work: Callable[[], Coroutine[Any, Any, T]], loop_factory: LoopFactory | None = None) -> T:
    if not _is_in_loop():
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(work())
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def noted() -> T:
        task: Any = asyncio.current_task()
        begun.append((asyncio.get_running_loop(), task))
        return await work()

    def alone() -> T:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(noted())

    with ThreadPoolExecutor(1, thread_name_prefix="headrace") as threads:
        outcome = threads.submit(alone)
        try:
            return outcome.result()
        except KeyboardInterrupt:
            for loop, task in begun:
                loop.call_soon_threadsafe(task.cancel)
            raise


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
