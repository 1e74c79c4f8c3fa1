"""RAE in whole runs: means of agents that are apart, folded step by step, and the same after any kill."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from harness import CountingTasks, MemorySink, OneTurn, ParityScorer, make_pipeline, make_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_recovery import one_life

from headrace.algos.running_means import folded
from headrace.engines.scripted import ScriptedEngine, hashed_script
from headrace.plan import virtual_clock
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import Task, Trajectory


class KeepsBatches(ScriptedTrainer):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list = []

    async def step(self, batch):
        self.batches.append(batch)
        return await super().step(batch)


class TwoRoles(CountingTasks):
    def task(self, index: int) -> Task:
        return Task(id=str(index), prompt="", columns={"agent": ("first", "second")[index % 2]})


class TwoPolicies(OneTurn):
    """Both sample once; the episode's return is what each of them earned."""

    async def run(self, task, policy):
        prompt = np.array([int(task.id)], np.int32)
        turns = [await policy.sample(prompt, self._sampling) for _ in range(2)]
        return tuple([Trajectory(turns=(t,), text="", policy=p) for t, p in zip(turns, "ab", strict=True)])


class FirstAttemptWins(ParityScorer):
    async def score(self, task, episodes):
        return [{"won": float(e.attempt == 0) + 0.1 * int(task.id)} for e in episodes]


def run(run_dir: Path, changes=None, make_engine=ScriptedEngine, **parts):
    """State, batches and what was told of them."""
    plan = make_plan(**{"advantage": "rae", "rae_decay": 0.8, "max_lag": 0, **(changes or {})})

    async def whole():
        trainer, sink = KeepsBatches(), MemorySink()
        parts.update(engines=[make_engine()], trainer=trainer, sink=sink, scorer=FirstAttemptWins())
        state = await make_pipeline(run_dir, plan, **parts).run()
        return state, trainer.batches, sink.of("step")

    return virtual_clock.run(whole())


def reward(group: int, attempt: int) -> float:
    return float(attempt == 0) + 0.1 * group


@pytest.mark.parametrize("named", [False, True], ids=["one agent", "two roles"])
def test_each_step_is_held_against_the_means_of_before_it(tmp_path, named):
    state, batches, told = run(tmp_path, tasks=TwoRoles() if named else CountingTasks())
    means: dict[str, float] = {}
    for batch, figures in zip(batches, told, strict=True):
        expected = {f"baseline_{agent}": mean for agent, mean in means.items()}
        assert {k: v for k, v in figures.items() if k.startswith("baseline")} == pytest.approx(expected)
        after = dict(means)
        for sample in batch.samples:
            agent = f"{('first', 'second')[sample.group % 2]}/policy" if named else "policy"
            value = reward(sample.group, sample.attempt)
            advantage = value - means.get(agent, 0.0)
            np.testing.assert_allclose(sample.advantages[sample.loss_mask], advantage, rtol=1e-6)
            assert not sample.advantages[~sample.loss_mask].any()
            after[agent] = 0.8 * after.get(agent, 0.0) + 0.2 * value
        means = after
    assert state.means == pytest.approx(means)
    assert len(means) == (2 if named else 1)


def test_an_episode_counts_once_for_each_policy_that_acted_in_it(tmp_path):
    state, batches, _ = run(tmp_path, environment=TwoPolicies())
    earned = [reward(s.group, s.attempt) for batch in batches for s in batch.samples[::2]]
    expected = folded({}, [(name, value) for value in earned for name in "ab"], decay=0.8)
    assert state.means == pytest.approx(expected)


def test_late_attempts_are_held_against_the_means_too(tmp_path):
    changes = {"max_lag": 2, "group_size": 4, "quorum": 0.75}
    engine = partial(ScriptedEngine, script=hashed_script(mean_tokens=12), token_s=0.02)
    _, batches, told = run(tmp_path, changes, make_engine=engine)
    assert any(figures.get("late_samples") for figures in told)
    for batch, figures in zip(batches, told, strict=True):
        found = [s.advantages[s.loss_mask][0] for s in batch.samples]
        earned = [reward(s.group, s.attempt) for s in batch.samples]
        mean = figures.get("baseline_policy", 0.0)
        np.testing.assert_allclose(found, np.array(earned) - mean, rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives=st.lists(st.floats(0.0, 1.5), max_size=4), checkpoint_every=st.integers(1, 4))
def test_a_run_that_was_killed_uses_the_means_of_one_that_was_not(lives, checkpoint_every, tmp_path_factory):
    """Without lag equal settings give equal batches, so those of the unkilled run are what must be seen."""
    plan = make_plan(steps=5, advantage="rae", max_lag=0, checkpoint_every=checkpoint_every, error_budget=0.5)
    seen: dict = {}
    unkilled = virtual_clock.run(one_life(tmp_path_factory.mktemp("whole"), plan, None, seen))
    run_dir = tmp_path_factory.mktemp("killed")
    for life_s in (*lives, None):
        ended = virtual_clock.run(one_life(run_dir, plan, life_s, seen))
        if ended is not None:
            break
    assert ended is not None and unkilled is not None
    assert ended[0].means == unkilled[0].means
