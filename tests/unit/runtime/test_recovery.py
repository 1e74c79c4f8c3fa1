"""A controller that dies at any moment of a random schedule: its successors lose and repeat nothing."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

from harness import MemorySink, ParityScorer, make_pipeline, make_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.engines.scripted import ScriptedEngine, hashed_script
from headrace.errors import RewardError
from headrace.plan import virtual_clock
from headrace.trainers.scripted import ScriptedTrainer


class FlakyScorer(ParityScorer):
    """Fails on some tasks, always the same ones."""

    async def score(self, task, episodes):
        if int(task.id) % 7 == 5:
            raise RewardError("flaky")
        return await super().score(task, episodes)


class Sink(MemorySink):
    """Checks the books at every event."""

    pipeline = None

    def emit(self, event, fields):
        super().emit(event, fields)
        if self.pipeline is not None:
            self.pipeline.state.ledger.check()


class SameBatches(ScriptedTrainer):
    """Whoever trains a step gets the same batch for it, in whatever life."""

    def __init__(self, seen: dict, **kwargs) -> None:
        super().__init__(**kwargs)
        self.seen = seen

    async def step(self, batch):
        told = [(s.group, s.attempt, s.advantages.tobytes(), s.versions.tobytes()) for s in batch.samples]
        assert self.seen.setdefault(batch.step, told) == told
        return await super().step(batch)


async def one_life(run_dir: Path, plan, life_s: float | None, seen: dict):
    """Run until the plan is done (returns state and trainer) or until killed after ``life_s``; ``seen`` are the
    batches of all lives."""
    sink = Sink()
    trainer = SameBatches(seen, token_s=0.002)
    engine = ScriptedEngine(script=hashed_script(mean_tokens=12), token_s=0.02)
    pipeline = make_pipeline(
        run_dir, plan, engines=[engine], trainer=trainer, scorer=FlakyScorer(0.05), sink=sink
    )
    sink.pipeline = pipeline
    task = asyncio.ensure_future(pipeline.run())
    done, _ = await asyncio.wait({task}, timeout=life_s)
    if done:
        return task.result(), trainer
    # A kill is abrupt: whatever cleaning up does after it must not reach the journal.
    pipeline._journal.flush = lambda: None  # type: ignore[method-assign]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lives=st.lists(st.floats(0.0, 3.0), max_size=5),
    max_lag=st.integers(0, 3),
    policy=st.sampled_from(["pace", "drop"]),
    drop_zero_variance=st.booleans(),
    mode=st.sampled_from(["never", "drain", "abort", "block"]),
    checkpoint_every=st.integers(1, 4),
    over_provision=st.sampled_from([None, 1.0, 1.5]),
    advantage=st.sampled_from(["grpo", "rae"]),
)
def test_killed_at_random_moments(
    lives, max_lag, policy, drop_zero_variance, mode, checkpoint_every, over_provision, advantage
):
    plan = make_plan(
        steps=5,
        max_lag=max_lag,
        staleness=policy,
        drop_zero_variance=drop_zero_variance,
        interrupt=mode,
        checkpoint_every=checkpoint_every,
        over_provision=over_provision,
        advantage=advantage,
        error_budget=0.5,
    )
    _, trainer = all_lives(plan, lives)
    assert len(trainer.counts) == plan.steps * plan.groups_per_step * plan.group_size


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lives=st.lists(st.floats(0.0, 3.0), max_size=5),
    max_lag=st.integers(1, 3),
    policy=st.sampled_from(["pace", "drop"]),
    drop_zero_variance=st.booleans(),
    mode=st.sampled_from(["never", "drain", "abort", "block"]),
    checkpoint_every=st.integers(1, 4),
    over_provision=st.sampled_from([None, 1.0, 1.5]),
    advantage=st.sampled_from(["grpo", "rae"]),
)
def test_killed_at_random_moments_with_late_attempts(
    lives, max_lag, policy, drop_zero_variance, mode, checkpoint_every, over_provision, advantage
):
    plan = make_plan(
        steps=5,
        group_size=4,
        quorum=0.75,
        max_lag=max_lag,
        staleness=policy,
        drop_zero_variance=drop_zero_variance,
        interrupt=mode,
        checkpoint_every=checkpoint_every,
        over_provision=over_provision,
        advantage=advantage,
        error_budget=0.5,
    )
    state, trainer = all_lives(plan, lives)
    assert state.num_trained_groups == plan.total_groups
    by_group = Counter(name.split("/")[0] for name in trainer.counts)
    assert len(by_group) == plan.total_groups
    assert set(by_group.values()) <= {3, 4}


def all_lives(plan, lives):
    """State and trainer of the last one; nothing was lost, repeated or too old."""
    seen: dict = {}
    with tempfile.TemporaryDirectory() as name:
        for life_s in (*lives, None):
            ended = virtual_clock.run(one_life(Path(name), plan, life_s, seen))
            if ended is not None:
                break
    assert ended is not None
    state, trainer = ended
    assert state.step == plan.steps
    assert set(trainer.counts.values()) == {1}
    assert max(trainer.lags) <= plan.max_lag
    state.ledger.check()
    counts = state.ledger.attempts()
    assert counts["trained"] == len(trainer.counts)
    assert sum(counts[s] for s in ("generating", "scoring", "buffered", "training")) == 0
    if plan.staleness == "pace":
        assert counts["dropped:stale"] == 0
    return state, trainer


def test_finished_groups_are_not_generated_again(tmp_path):
    plan = make_plan(steps=4, max_lag=3)
    assert virtual_clock.run(one_life(tmp_path, plan, 0.6, {})) is None

    async def second_life():
        engine = ScriptedEngine(script=hashed_script(mean_tokens=12), token_s=0.02)
        pipeline = make_pipeline(tmp_path, plan, engines=[engine])
        before = pipeline.state.ledger.num_sampled_tokens
        state = await pipeline.run()
        return before, engine.num_tokens, state.ledger.num_sampled_tokens

    known, sampled, total = virtual_clock.run(second_life())
    assert known > 0
    assert known + sampled == total


class HangingScorer(ParityScorer):
    """Never done with the first task."""

    async def score(self, task, episodes):
        await asyncio.sleep(1e6 if task.id == "0" else 0.0)
        return await super().score(task, episodes)


class InstantScorer(ParityScorer):
    async def score(self, task, episodes):
        return [{"attempt": float(episode.attempt)} for episode in episodes]


def test_a_group_that_is_too_old_when_it_is_adopted_is_dropped_though_it_was_scored_at_once(tmp_path):
    async def first_life():
        pipeline = make_pipeline(
            tmp_path, make_plan(max_lag=3, staleness="drop"), scorer=HangingScorer(), sink=MemorySink()
        )
        asyncio.get_running_loop().call_later(0.3, pipeline.request_stop)
        return await pipeline.run()

    state = virtual_clock.run(first_life())
    assert len(state.groups[0].episodes) == 3
    assert state.version - state.groups[0].version > 1

    async def second_life():
        plan, sink = make_plan(max_lag=1, staleness="drop"), MemorySink()
        state = await make_pipeline(tmp_path, plan, scorer=InstantScorer(), sink=sink).run()
        return state, [(drop["group"], drop["reason"]) for drop in sink.of("drop")]

    state, drops = virtual_clock.run(second_life())
    assert state.step == 6
    assert state.groups == {}
    assert (0, "stale") in drops
