"""Stragglers on the virtual clock: answers whose lengths have a long tail, and what a step waits for."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from harness import MemorySink, OneTurn, make_pipeline, make_plan

from headrace.engines.scripted import ScriptedEngine
from headrace.plan import virtual_clock
from headrace.runtime.ledger import AttemptLedger
from headrace.trainers.scripted import ScriptedTrainer

MAX_TOKENS = 4000


def long_tailed(request):
    """Lengths with a tenth of them above five medians of 20; the first token decides the reward."""
    draw = np.random.default_rng(request.seed)
    length = int(np.clip(20 * draw.lognormal(0.0, 1.256), 1, request.sampling.max_tokens))
    return draw.integers(0, 100, length).astype(np.int32)


class Batches(ScriptedTrainer):
    """Also remembers what each step was given."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = []

    async def step(self, batch):
        self.seen.append(batch)
        return await super().step(batch)


def run(run_dir, script=long_tailed, **changes):
    """(state, trainer, sink, seconds of virtual time)"""
    plan = make_plan(**{"steps": 30, "group_size": 4, "groups_per_step": 4, "checkpoint_every": 0, **changes})

    async def main():
        trainer, sink = Batches(), MemorySink()
        engine = ScriptedEngine(script=script, token_s=0.01, chunk_tokens=10)
        pipeline = make_pipeline(
            run_dir, plan, engines=[engine], trainer=trainer, sink=sink, environment=OneTurn(MAX_TOKENS)
        )
        state = await pipeline.run()
        state.ledger.check()
        assert engine.num_tokens == state.ledger.num_sampled_tokens
        return state, trainer, sink, asyncio.get_running_loop().time()

    return virtual_clock.run(main())


def mean_lag(sink):
    return np.mean([step["lag_mean"] for step in sink.of("step")])


def test_a_few_groups_more_than_a_batch_take_the_barrier_away_and_stay_fresh(tmp_path):
    """What over-provisioning adds to the lag bound: a late group has four steps' time, and yet few run ahead."""
    _, _, _, synchronous = run(tmp_path / "sync", max_lag=0)
    state, trainer, few, few_s = run(tmp_path / "few", max_lag=4, over_provision=1.5)
    _, _, many, many_s = run(tmp_path / "many", max_lag=4)
    assert few_s < 0.7 * synchronous
    assert max(trainer.lags) <= 4
    assert mean_lag(few) < 0.5 * mean_lag(many)
    attempts = state.ledger.attempts()
    assert attempts["trained"] == state.ledger.num_admitted == 30 * 4 * 4
    assert state.ledger.length_bias() == 1.0
    assert many_s < few_s


@pytest.mark.parametrize(
    "over_provision, capacity", [(None, 30), (1.0, 10), (1.1, 11), (1.25, 13), (3.0, 30)]
)
def test_capacity_in_batches(over_provision, capacity):
    plan = make_plan(max_lag=2, groups_per_step=10, over_provision=over_provision)
    assert plan.capacity == capacity


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_every_step_trains_informative_groups_and_the_refill_is_exact(tmp_path, max_lag):
    """With two attempts a group, about half of the groups have equal rewards."""
    state, trainer, sink, _ = run(tmp_path, max_lag=max_lag, group_size=2, drop_zero_variance=True)
    for batch in trainer.seen:
        groups = {sample.group for sample in batch.samples}
        assert len(groups) == 4
        for group in groups:
            assert any(
                sample.advantages[sample.loss_mask].any() for sample in batch.samples if sample.group == group
            )
    num_dropped = len(sink.of("drop"))
    assert num_dropped > 30
    assert {drop["reason"] for drop in sink.of("drop")} == {"zero-variance"}
    # One admission for each group trained and each dropped, and none beyond.
    assert state.next_group == 30 * 4 + num_dropped
    for step in sink.of("step"):
        attempts = step["attempts"]
        live = sum(attempts[name] for name in ("generating", "scoring", "buffered", "training"))
        assert live <= (max_lag + 1) * 4 * 2


def test_age_spread_of_a_batch_is_shown(tmp_path):
    _, trainer, sink, _ = run(tmp_path, max_lag=3, group_size=2, drop_zero_variance=True)
    shown = [step["age_spread"] for step in sink.of("step")]
    for batch, spread in zip(trainer.seen, shown, strict=True):
        oldest = [int(s.versions[s.loss_mask].min()) for s in batch.samples]
        assert spread == max(oldest) - min(oldest) <= 3
    assert max(shown) > 0


def test_dropping_late_groups_favours_short_answers_and_the_books_say_so(tmp_path):
    paced, *_ = run(tmp_path / "pace", max_lag=1)
    dropping, *_ = run(tmp_path / "drop", max_lag=1, staleness="drop")
    assert paced.ledger.length_bias() == 1.0
    assert dropping.ledger.attempts()["dropped:stale"] > 0
    assert dropping.ledger.length_bias() < 0.9


def test_length_bias_counts_what_ended():
    ledger = AttemptLedger()
    assert ledger.length_bias() is None
    ledger.admit(0, 4)
    for attempt, num_tokens in enumerate((10, 30, 50, 999)):
        ledger.sampled(0, attempt, num_tokens)
    for before, after in (("generating", "scoring"), ("scoring", "buffered"), ("buffered", "training")):
        ledger.move(0, (0,), before, after)
    ledger.move(0, (0,), "training", "trained")
    ledger.move(0, (1,), "generating", "scoring")
    ledger.drop(0, (2,), "stale")
    assert ledger.length_bias() == pytest.approx(10 / 30)
