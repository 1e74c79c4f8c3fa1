"""Hierarchical GRPO: solvers are compared within one proposed problem, proposers within their source task."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from harness import MemorySink, OneTurn, ParityScorer, make_pipeline, make_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.algos.advantages import ADVANTAGES, BY_THE_TRAINER
from headrace.data.steps import parse_rule
from headrace.engines.scripted import ScriptedEngine, hashed_script
from headrace.plan import virtual_clock
from headrace.runtime import peers
from headrace.runtime.plan import ProcessPlan
from headrace.runtime.recording import read_recording
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import Trajectory

NUM_SOLVERS = 3


def last_digit(turn) -> float:
    return float(turn.completion.token_ids[-1] % 10) / 10


def _paid(turn, **names) -> Trajectory:
    return Trajectory(turns=(turn,), text="", own_reward=last_digit(turn), **names)


class ProposerAndSolvers(OneTurn):
    """One proposal, then solvers of it; each is paid by its last token. A judge that is not trained looks on."""

    async def run(self, task, policy):
        source = np.array([int(task.id)], np.int32)
        proposal = await policy.sample(source, self._sampling)
        problem = proposal.completion.token_ids
        solutions = [await policy.sample(problem, self._sampling) for _ in range(NUM_SOLVERS)]
        judged = await policy.sample(source, self._sampling)
        named = f"solver of {problem.tobytes().hex()}"
        return (
            _paid(proposal, policy="proposer", peers="proposer"),
            *[_paid(solution, policy="solver", peers=named) for solution in solutions],
            Trajectory(turns=(judged,), text="", trainable=False, own_reward=7.0),
        )


class Quiet(ParityScorer):
    """Attempts as wholes earn a little, all the same in a group."""

    async def score(self, task, episodes):
        return [{"whole": 0.5} for _ in episodes]


class KeepsBatches(ScriptedTrainer):
    def __init__(self, seen: dict) -> None:
        super().__init__()
        self.seen = seen

    async def step(self, batch):
        told = [(s.group, s.attempt, s.advantages.tobytes(), s.token_ids.tobytes()) for s in batch.samples]
        assert self.seen.setdefault(batch.step, (told, batch))[0] == told
        return await super().step(batch)


def run(run_dir: Path, *, lives=(None,), seen=None, environment=ProposerAndSolvers, **changes):
    """Batches by step, the last life's state and the drops of all."""
    plan = make_plan(**{"max_lag": 0, "steps": 4, "drop_zero_variance": True, **changes})
    seen, drops = {} if seen is None else seen, []

    async def life(life_s):
        sink = MemorySink()
        engine = ScriptedEngine(script=hashed_script(mean_tokens=6), token_s=0.02)
        parts = {"engines": [engine], "trainer": KeepsBatches(seen), "scorer": Quiet(), "sink": sink}
        pipeline = make_pipeline(run_dir, plan, environment=environment(), **parts)
        task = asyncio.ensure_future(pipeline.run())
        done, _ = await asyncio.wait({task}, timeout=life_s)
        if not done:
            pipeline._journal.flush = lambda: None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        drops.extend(sink.of("drop"))
        return task.result() if done else None

    for life_s in lives:
        state = virtual_clock.run(life(life_s))
        if state is not None:
            break
    return {step: batch for step, (_, batch) in seen.items()}, state, drops


def by_role(samples):
    """Of one group: the proposers, and the solvers of each attempt; a prompt of one token is the source task."""
    proposers = [s for s in samples if s.loss_mask.argmax() == 1]
    solvers: dict[bytes, list] = {}
    for sample in samples:
        if sample.loss_mask.argmax() > 1:
            problem = sample.token_ids[: sample.loss_mask.argmax()]
            solvers.setdefault(problem.tobytes(), []).append(sample)
    return [proposers, *solvers.values()]


def grpo(values: list[float]) -> list[float]:
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    return [(value - mean) / (deviation + 1e-4) for value in values]


def test_everybody_is_compared_with_its_peers_alone(tmp_path):
    batches, _, _ = run(tmp_path)
    assert len(batches) == 4
    for batch in batches.values():
        for group in {s.group for s in batch.samples}:
            alike = by_role([s for s in batch.samples if s.group == group])
            assert [len(samples) for samples in alike] == [3, NUM_SOLVERS, NUM_SOLVERS, NUM_SOLVERS]
            for samples in alike:
                earned = [0.5 + float(s.token_ids[-1] % 10) / 10 for s in samples]
                for sample, expected in zip(samples, grpo(earned), strict=True):
                    found = sample.advantages[sample.loss_mask]
                    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - BY_THE_TRAINER))
def test_every_advantage_is_taken_within_peers(name, tmp_path):
    whole = run(tmp_path, steps=1, advantage=name)[0][1]
    assert len(whole.samples) == 2 * 3 * (1 + NUM_SOLVERS)
    assert all(np.isfinite(s.advantages).all() for s in whole.samples)
    assert any(s.advantages.any() for s in whole.samples)


def test_agents_with_rewards_of_their_own_have_their_own_means(tmp_path):
    batches, state, _ = run(tmp_path, advantage="rae", rae_decay=0.5, steps=1, drop_zero_variance=False)
    means = {"proposer": 0.0, "solver": 0.0}
    for sample in batches[1].samples:
        agent = "proposer" if sample.loss_mask.argmax() == 1 else "solver"
        value = 0.5 + float(sample.token_ids[-1] % 10) / 10
        np.testing.assert_allclose(sample.advantages[sample.loss_mask], value, rtol=1e-6)
        means[agent] = 0.5 * means[agent] + 0.5 * value
    assert state.means == pytest.approx(means)


class AllAlike(ProposerAndSolvers):
    """Proposers differ between groups only, and solvers from proposers: nobody from its peers."""

    async def run(self, task, policy):
        trajectories = await super().run(task, policy)
        own = {"proposer": float(int(task.id)), "solver": 0.25, "policy": 0.0}
        odd = int(task.id) % 2
        return tuple(
            [replace(t, own_reward=own[t.policy] + odd * last_digit(t.turns[0])) for t in trajectories]
        )


def test_a_group_is_dropped_where_nobody_differs_from_its_peers(tmp_path):
    batches, _, drops = run(tmp_path, environment=AllAlike, steps=2, max_lag=1)
    assert drops and {(drop["reason"], drop["group"] % 2) for drop in drops} == {("zero-variance", 0)}
    assert all(s.group % 2 for batch in batches.values() for s in batch.samples)


def test_a_quorum_waits_for_missing_peers(tmp_path):
    batches, _, drops = run(tmp_path, group_size=4, quorum=0.5, max_lag=2)
    assert not drops
    assert {len(b.samples) for b in batches.values()} == {2 * 4 * (1 + NUM_SOLVERS)}


def test_judged_steps_cannot_be_added_to_rewards_of_trajectories(tmp_path):
    process = ProcessPlan(rule=parse_rule("tokens:2", lambda text: ()))
    with pytest.raises(Exception, match=r"rewards or peers of their own.*scoring\.process"):
        run(tmp_path, process=process, drop_zero_variance=False)


def test_a_baseline_of_attempts_knows_no_peers(tmp_path):
    with pytest.raises(Exception, match=r"rewards or peers of their own.*vcpo compares attempts"):
        run(tmp_path, advantage="vcpo")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives=st.lists(st.floats(0.0, 4.0), max_size=3), checkpoint_every=st.integers(1, 4))
def test_a_killed_run_compares_as_one_that_was_not(lives, checkpoint_every, tmp_path_factory):
    seen: dict = {}
    run_all = partial(run, seen=seen, checkpoint_every=checkpoint_every)
    run_all(tmp_path_factory.mktemp("whole"))
    batches, state, _ = run_all(tmp_path_factory.mktemp("killed"), lives=(*lives, None))
    assert state.step == 4 and len(batches) == 4


def test_what_is_recorded_names_them_too(tmp_path):
    run(tmp_path, checkpoint_every=0, steps=1)
    episodes = [e for group in read_recording(tmp_path).groups.values() for e in group.episodes()]
    assert episodes and peers.names_any(episodes)
    roles = [(t.policy, t.peers.partition(" ")[0], t.trainable) for t in episodes[0].trajectories]
    assert roles == [("proposer", "proposer", True), *[("solver", "solver", True)] * 3, ("policy", "", False)]
