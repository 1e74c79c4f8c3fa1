"""Stragglers on the virtual clock: answers whose lengths have a long tail, and what a step waits for."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from harness import MemorySink, OneTurn, ParityScorer, make_pipeline, make_plan

from headrace.algos.advantages import ADVANTAGES, against_frozen, grpo
from headrace.data.record_checks import Limits
from headrace.engines.scripted import ScriptedEngine
from headrace.errors import RewardError
from headrace.plan import virtual_clock
from headrace.replay.check import check_recording
from headrace.runtime.ledger import AttemptLedger
from headrace.runtime.recording import read_recording
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import ScoreColumn

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


def run(
    run_dir, script=long_tailed, environment=None, scorer=None, source=None, stop_after_s=None, **changes
):
    """(state, trainer, sink, seconds of virtual time)"""
    plan = make_plan(**{"steps": 30, "group_size": 4, "groups_per_step": 4, "checkpoint_every": 0, **changes})

    async def main():
        trainer, sink = Batches(), MemorySink()
        engine = ScriptedEngine(script=script, token_s=0.01, chunk_tokens=10)
        pipeline = make_pipeline(
            run_dir,
            plan,
            engines=[engine],
            trainer=trainer,
            sink=sink,
            environment=environment or OneTurn(MAX_TOKENS),
            scorer=scorer,
            reference=None if source is None else ScriptedEngine("reference"),
            sources=[] if source is None else [source],
        )
        before = pipeline.state.ledger.num_sampled_tokens
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, pipeline.request_stop)
        state = await pipeline.run()
        state.ledger.check()
        assert engine.num_tokens == state.ledger.num_sampled_tokens - before
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


def test_a_quorum_does_not_wait_for_the_slowest_attempt_and_loses_none(tmp_path):
    ask = {"max_lag": 2, "over_provision": 1.0, "group_size": 8}
    _, _, _, whole_s = run(tmp_path / "whole", **ask)
    state, trainer, sink, quorum_s = run(tmp_path / "quorum", quorum=0.75, **ask)
    assert quorum_s < 0.6 * whole_s
    assert max(trainer.lags) <= 2
    assert set(trainer.counts.values()) == {1}
    assert state.num_trained_groups == 30 * 4
    attempts = state.ledger.attempts()
    # Only what was under way when the run ended is not trained.
    assert attempts["trained"] + attempts["dropped:cancelled"] == state.ledger.num_admitted == 30 * 4 * 8
    assert 0 < attempts["dropped:cancelled"] < 0.02 * state.ledger.num_admitted
    assert sum(step.get("late_samples", 0) for step in sink.of("step")) > 100


def test_late_attempts_are_held_against_the_frozen_returns(tmp_path):
    """Rewards are the parity of the first token; the quorum's alone decide what a late attempt is worth."""
    _, trainer, _, _ = run(tmp_path, max_lag=2, group_size=8, quorum=0.75)
    parts: dict[int, list] = {}
    for batch in trainer.seen:
        for group in sorted({sample.group for sample in batch.samples}):
            parts.setdefault(group, []).append([s for s in batch.samples if s.group == group])
    num_late = 0
    for trained in parts.values():
        # Either part may be trained first; in one batch they cannot be told apart here.
        quorum, *late = sorted(trained, key=len, reverse=True)
        for samples in late:
            assert len(quorum) >= 6
            frozen = [reward(sample) for sample in quorum]
            expected = against_frozen("grpo", list(map(reward, samples)), frozen, group_size=8)
            assert [s.advantages[s.loss_mask][0] for s in samples] == pytest.approx(expected.tolist())
            num_late += len(samples)
    assert num_late > 50


def reward(sample):
    return float(sample.token_ids[sample.loss_mask][0] % 2 == 0)


def test_late_attempts_that_would_be_too_old_are_dropped_and_counted(tmp_path):
    ask = {"max_lag": 1, "group_size": 8, "quorum": 0.75}
    paced, _, _, paced_s = run(tmp_path / "pace", **ask)
    state, trainer, _, dropping_s = run(tmp_path / "drop", staleness="drop", **ask)
    assert paced.ledger.attempts()["dropped:stale"] == 0
    assert state.ledger.attempts()["dropped:stale"] > 0
    assert state.ledger.length_bias() < 1 < paced_s / dropping_s
    assert max(trainer.lags) <= 1


def test_a_quorum_that_tells_nothing_apart_waits_for_the_others(tmp_path):
    """Three fast attempts earn the same, the slow one does not: without it there would be no scale to hold it to."""

    def script(request):
        is_slow = request.id.split("/")[1] == "3"
        return np.full(200 if is_slow else 10, 1 if is_slow else 2, np.int32)

    ask = {"script": script, "max_lag": 2, "quorum": 0.75, "steps": 4, "drop_zero_variance": True}
    state, trainer, sink, _ = run(tmp_path, **ask)
    assert not sink.of("drop")
    assert state.ledger.attempts()["trained"] == state.ledger.num_admitted == 4 * 4 * 4
    for batch in trainer.seen:
        assert sorted(round(float(s.advantages[s.loss_mask][0]), 2) for s in batch.samples[:4]) == [
            -1.5,
            0.5,
            0.5,
            0.5,
        ]


@pytest.mark.parametrize("name", ["dr-grpo", "rloo", "reinforce++", "lite-ppo"])
def test_frozen_baseline_is_the_mean_of_the_quorum(name):
    late = against_frozen(name, [1.0, 0.0], [1.0, 0.0, 0.0, 1.0], group_size=6)
    assert late.tolist() == [0.5, -0.5]
    if name == "rloo":
        # To the others' mean it is what the whole group would have said of one late attempt.
        assert late[0] == ADVANTAGES[name]([1.0, 0.0, 0.0, 1.0, 1.0])[-1]


def test_a_dissenter_gets_no_more_than_in_a_whole_group():
    nearly = [1.0, 1.0, 1.0, 1.0, 1.0, 0.999]
    (late,) = against_frozen("grpo", [0.0], nearly, group_size=8)
    assert late == pytest.approx(-7 / np.sqrt(8))
    assert abs(late) >= abs(grpo([1.0] * 7 + [0.0])[-1])
    assert against_frozen("maxrl", [0.0, 2.0], [0.1, 0.0, 0.0], group_size=4).tolist() == [-1.0, 3.0]


def one_slow(request):
    """The attempt numbered 3 takes twenty times as long as the others; their first tokens differ."""
    attempt = int(request.id.split("/")[1])
    return np.full(200 if attempt == 3 else 10, attempt, np.int32)


class LastOneFails(OneTurn):
    async def run(self, task, policy):
        trajectories = await super().run(task, policy)
        if len(trajectories[0].turns[0].completion.token_ids) == 200:
            raise ValueError("broke at the end")
        return trajectories


def test_a_late_attempt_that_fails_is_dropped_alone(tmp_path):
    ask = {"script": one_slow, "max_lag": 2, "quorum": 0.75, "steps": 4, "error_budget": 1.0}
    state, _, sink, _ = run(tmp_path, environment=LastOneFails(MAX_TOKENS), **ask)
    attempts = state.ledger.attempts()
    assert attempts["trained"] == 4 * 4 * 3
    assert attempts["dropped:failed"] + attempts["dropped:cancelled"] == 4 * 4
    assert attempts["dropped:failed"] == sum(drop["reason"] == "failed" for drop in sink.of("drop")) > 0
    assert "broke at the end" in sink.of("drop")[0]["detail"]


def test_a_step_goes_ahead_when_the_attempt_it_waited_for_has_failed(tmp_path):
    """Nothing replaces a late attempt, so nothing else would tell the trainer."""
    ask = {"script": one_slow, "max_lag": 1, "quorum": 0.75, "steps": 4, "error_budget": 1.0, "stall_s": 1e6}
    state, _, _, seconds = run(tmp_path, environment=LastOneFails(MAX_TOKENS), **ask)
    assert state.step == 4 and state.ledger.attempts()["dropped:failed"] > 0
    assert seconds < 1e3


class QuorumFails(ParityScorer):
    async def score(self, task, episodes):
        if int(task.id) < 3:
            raise RewardError("no reward for three tasks")
        return await super().score(task, episodes)


def test_a_quorum_without_scores_ends_the_whole_group_and_counts_what_the_late_one_had(tmp_path):
    """``run`` holds the engine's own count of tokens against the books."""
    ask = {"script": one_slow, "max_lag": 2, "quorum": 0.75, "steps": 4}
    state, _, _, _ = run(tmp_path, scorer=QuorumFails(0.5), **ask)
    assert state.ledger.attempts()["dropped:failed"] == 3 * 4
    assert 3 * 30 < state.ledger.tokens()["dropped:failed"] < 3 * 230


def test_a_run_with_late_attempts_is_stopped_resumed_and_its_records_are_whole(tmp_path):
    ask = {"max_lag": 3, "group_size": 8, "quorum": 0.75, "steps": 12, "keep_checkpoints": 100}
    stopped, *_ = run(tmp_path, stop_after_s=12.0, checkpoint_every=2, **ask)
    assert 0 < stopped.step < 12
    assert any(live.quorum and live.unscored is not None for live in stopped.groups.values())
    check(tmp_path, stopped)
    state, trainer, *_ = run(tmp_path, checkpoint_every=2, **ask)
    assert state.num_trained_groups == 12 * 4
    assert set(trainer.counts.values()) == {1}
    assert state.ledger.attempts()["dropped:stale"] == 0
    check(tmp_path, state)


def test_late_attempts_that_fail_after_a_resumption_are_dropped_alone(tmp_path):
    """What their quorum had released before waits for its step all the same."""
    ask = {"script": one_slow, "max_lag": 2, "quorum": 0.75, "steps": 4, "error_budget": 1.0}
    stopped, *_ = run(tmp_path, stop_after_s=1.0, **ask)
    assert any(live.scored is not None and live.unscored is not None for live in stopped.groups.values())
    state, trainer, sink, _ = run(tmp_path, environment=LastOneFails(MAX_TOKENS), **ask)
    assert {drop["reason"] for drop in sink.of("drop")} <= {"failed", "cancelled"}
    assert state.ledger.attempts()["trained"] == len(trainer.counts) == 4 * 4 * 3
    assert set(trainer.counts.values()) == {1}


def check(run_dir, state):
    recording = read_recording(run_dir)
    assert len(recording.groups) == state.next_group
    limits = Limits(vocab_size=100, newest_version=recording.newest_version)
    faults = check_recording(recording, limits, seed=0).faults
    # The script ends where it likes, not with a stop token.
    assert not [fault for fault in faults if fault.check != "finish"]
    late = [
        group.ended for group in recording.groups.values() if "late attempts trained in step" in group.ended
    ]
    assert late


class SlowJudge:
    """Asked about each attempt as it ends, and slow enough to answer about late ones while a quorum waits."""

    name, required, per_attempt, deadline_s, concurrency = "judge", False, True, 100.0, 64

    def __init__(self):
        self.asked = Counter()

    async def score(self, task, episodes):
        await asyncio.sleep(1.0)
        self.asked.update((e.group, e.attempt) for e in episodes)
        return [
            ScoreColumn(source=self.name, group=e.group, attempt=e.attempt, rewards={"judge": e.attempt / 8})
            for e in episodes
        ]


def test_scores_of_late_attempts_stay_with_them_and_are_asked_for_once(tmp_path):
    judge = SlowJudge()
    state, trainer, sink, _ = run(tmp_path, source=judge, max_lag=3, group_size=8, quorum=0.75, steps=12)
    assert sum(step.get("late_samples", 0) for step in sink.of("step")) > 20
    assert set(judge.asked.values()) == {1}
    assert not state.missing_scores
    for batch in trainer.seen:
        for sample in batch.samples:
            assert sample.ref_logprobs is not None and len(sample.ref_logprobs) == sample.num_tokens


class NegativeOnce(ParityScorer):
    """What ``maxrl`` refuses, of the first task."""

    async def score(self, task, episodes):
        return [{"value": -1.0 - e.attempt if task.id == "0" else float(e.attempt)} for e in episodes]


def test_a_quorum_whose_advantages_cannot_be_computed_takes_its_late_attempt_along(tmp_path):
    ask = {"script": one_slow, "max_lag": 2, "quorum": 0.75, "steps": 4, "advantage": "maxrl"}
    state, _, sink, _ = run(tmp_path, scorer=NegativeOnce(), **ask)
    failed = [drop for drop in sink.of("drop") if drop["reason"] == "failed"]
    assert {drop["group"] for drop in failed} == {0}
    assert "none may be below 0" in failed[0]["detail"]
    assert state.ledger.attempts()["dropped:failed"] == 4
    assert state.num_trained_groups == 4 * 4
