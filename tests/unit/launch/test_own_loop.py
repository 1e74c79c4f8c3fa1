"""Coroutines run to their end from ordinary code, with and without a loop around it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from headrace.launch import own_loop


class MarkedLoop(asyncio.SelectorEventLoop):
    pass


async def kind_of_loop() -> tuple[str, bool]:
    await asyncio.sleep(0)
    return type(asyncio.get_running_loop()).__name__, threading.current_thread() is threading.main_thread()


def test_without_a_loop_it_is_this_thread_that_works():
    assert own_loop.run(kind_of_loop, MarkedLoop) == ("MarkedLoop", True)


def test_a_loop_that_runs_already_is_left_alone():
    async def cell() -> tuple[str, bool]:
        found = own_loop.run(kind_of_loop, MarkedLoop)
        await asyncio.sleep(0)
        return found

    assert asyncio.run(cell()) == ("MarkedLoop", False)


def test_the_loop_is_closed_when_the_work_is_said_to_be_done():
    closed = []

    class Slow(asyncio.SelectorEventLoop):
        def close(self) -> None:
            threading.Event().wait(0.05)
            super().close()
            closed.append(self)

    async def cell() -> int:
        own_loop.run(kind_of_loop, Slow)
        return len(closed)

    assert asyncio.run(cell()) == 1


def test_an_error_is_raised_where_it_was_asked_for():
    async def fails() -> None:
        raise ValueError("of the work")

    async def cell() -> None:
        own_loop.run(fails)

    with pytest.raises(ValueError, match="of the work"):
        asyncio.run(cell())


def test_an_interrupt_ends_the_work_before_it_is_raised():
    """As in a notebook, whose loop leaves signals to Python."""
    ended = []

    async def works() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(600)
        finally:
            ended.append("in order")

    async def cell() -> None:
        own_loop.run(works)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
    finally:
        loop.close()
        signal.signal(signal.SIGINT, before)
    assert ended == ["in order"]
