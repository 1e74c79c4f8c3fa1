"""The controller's event loop: what it does to the process it runs in ends with it."""

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
