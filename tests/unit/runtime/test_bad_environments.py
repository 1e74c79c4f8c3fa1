"""What an environment must not return: the group is dropped, the drop says what was wrong, and the run goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from harness import MemorySink, OneTurn, make_pipeline, make_plan

from headrace.plan import virtual_clock
from headrace.types import Trajectory


class Wrong(OneTurn):
    """Spoils what the attempts at one task return."""

    def __init__(self, spoil):
        super().__init__()
        self._spoil = spoil

    async def run(self, task, policy):
        returned = await super().run(task, policy)
        return self._spoil(returned[0]) if task.id == "2" else returned


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: None, "is a NoneType; return a tuple of Trajectory"),
        (lambda t: t, "is a Trajectory; return a tuple of Trajectory"),
        (lambda t: (), "holds no turn"),
        (lambda t: (t, Trajectory(turns=(), text="")), "holds no turn"),
        (
            lambda t: (replace(t, turns=(replace(t.turns[0]),)),),
            "has a turn that policy.sample did not return",
        ),
        (lambda t: (t, t), "has one turn twice"),
        (lambda t: (replace(t, own_reward=float("nan")),), "has own_reward = nan; give a finite number"),
        (lambda t: (replace(t, own_reward="1"),), "has own_reward = '1'; give a finite number"),
        (lambda t: (replace(t, peers=3),), "has peers = 3; give a text"),
    ],
)
def test_the_group_is_dropped_and_the_drop_says_why(spoil, said, tmp_path):
    sink = MemorySink()

    async def whole():
        return await make_pipeline(tmp_path, make_plan(), environment=Wrong(spoil), sink=sink).run()

    state = virtual_clock.run(whole())
    assert state.step == 6
    assert [drop["group"] for drop in sink.of("drop") if drop["reason"] == "failed"] == [2]
    (detail,) = [drop["detail"] for drop in sink.of("drop") if drop["group"] == 2]
    assert f"environment: what it returned for task 2 {said}" in detail


def test_numbers_of_numpy_are_rewards(tmp_path):
    async def whole():
        paid = Wrong(lambda t: (replace(t, own_reward=np.float32(0.5)),))
        return await make_pipeline(tmp_path, make_plan(), environment=paid).run()

    assert virtual_clock.run(whole()).step == 6
