"""The controller's event loop: where its time goes, and that what it does to its process ends with it."""

from __future__ import annotations

import asyncio
import gc

from headrace.launch.controller_loop import ControllerLoop


async def thresholds():
    return gc.get_threshold()


def test_the_garbage_collector_is_as_before_once_the_loop_is_closed():
    before, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    with asyncio.Runner(loop_factory=ControllerLoop) as runner:
        during = runner.run(thresholds())
        assert gc.get_freeze_count() > num_frozen
    assert during[0] > before[0] and during[1:] == before[1:]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


async def seconds_before_and_after_loading():
    """Of the loop, which waits for a callback on both sides of ``loaded``."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0.001)
    before = loop.status().seconds
    loop.loaded()
    await asyncio.sleep(0.001)
    return before, loop.status().seconds


def test_waiting_for_workers_to_start_is_loading():
    with asyncio.Runner(loop_factory=ControllerLoop) as runner:
        before, after = runner.run(seconds_before_and_after_loading())
    assert before["loading"] > 0 and before["working"] == before["waiting"] == 0
    assert after["loading"] >= before["loading"]
    assert after["waiting"] > 0 and after["working"] > 0
