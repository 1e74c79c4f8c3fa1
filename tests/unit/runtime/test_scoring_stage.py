"""Scoring beside generation and training: deadlines, faults by name, nothing asked twice."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness import MemorySink, OneTurn, ParityScorer, make_pipeline, make_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.engines.scripted import ScriptedEngine, hashed_script
from headrace.errors import RoleError
from headrace.observe.verdict import hidden_share
from headrace.plan import virtual_clock
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import ScoreColumn


class Teacher:
    """Gives every token of an attempt the log-probability -1, in ``seconds``."""

    name = "teacher"

    def __init__(self, *, seconds=0.0, required=False, per_attempt=True, concurrency=4, deadline_s=5.0):
        self.required, self.per_attempt = required, per_attempt
        self.concurrency, self.deadline_s = concurrency, deadline_s
        self._seconds = seconds
        self.asked = Counter()
        self.asked_at = {}
        self.num_running = self.most_running = 0

    async def score(self, task, episodes):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        for episode in episodes:
            self.asked[(episode.group, episode.attempt)] += 1
            self.asked_at[(episode.group, episode.attempt)] = asyncio.get_running_loop().time()
        try:
            await asyncio.sleep(self._seconds)
            return self.answer(episodes)
        finally:
            self.num_running -= 1

    def answer(self, episodes):
        return [
            ScoreColumn(
                source=self.name,
                group=e.group,
                attempt=e.attempt,
                logprobs=(np.full(e.num_tokens + 1, -1.0, np.float32),),
            )
            for e in episodes
        ]


class RecordingTrainer(ScriptedTrainer):
    def __init__(self, **options):
        super().__init__(**options)
        self.step_at = []

    async def step(self, batch):
        self.step_at.append(asyncio.get_running_loop().time())
        return await super().step(batch)


def run(tmp_path, plan, source, **parts):
    """Returns (pipeline, trainer, sink) of a finished run; parts are factories called inside the loop."""

    async def main():
        made = {name: factory() for name, factory in parts.items()}
        made.setdefault("trainer", RecordingTrainer())
        made.setdefault("sink", MemorySink())
        pipeline = make_pipeline(tmp_path, plan, sources=[source], **made)
        await pipeline.run()
        return pipeline, made["trainer"], made["sink"]

    return virtual_clock.run(main())


def scoring(sink):
    (role,) = [role for role in sink.of("step")[-1]["roles"] if role["role"] == "scoring"]
    return role


def test_every_attempt_is_scored_once_as_it_ends_and_its_scores_travel_with_the_group(tmp_path):
    seen = []

    class Scorer(ParityScorer):
        async def score(self, task, episodes):
            now = asyncio.get_running_loop().time()
            seen.append([now - teacher.asked_at[(e.group, e.attempt)] for e in episodes])
            return await super().score(task, episodes)

    teacher = Teacher(seconds=0.01)
    pipeline, trainer, _ = run(tmp_path, make_plan(), teacher, scorer=Scorer)
    assert set(teacher.asked.values()) == {1}
    assert set(trainer.counts.values()) == {1}
    assert any(max(waits) > 0 for waits in seen), "attempts that end early are scored while others go on"
    assert pipeline.state.missing_scores == {}


def test_groups_are_asked_about_whole_where_a_source_wants_it_so(tmp_path):
    sizes = []

    class Judge(Teacher):
        async def score(self, task, episodes):
            sizes.append(len(episodes))
            return await super().score(task, episodes)

    run(tmp_path, make_plan(), Judge(per_attempt=False))
    assert set(sizes) == {3}


def test_no_more_questions_are_under_way_than_a_source_takes(tmp_path):
    teacher = Teacher(seconds=0.05, concurrency=2)
    run(tmp_path, make_plan(max_lag=3), teacher)
    assert teacher.most_running == 2


@pytest.mark.parametrize("max_lag", [0, 2])
def test_the_trainer_never_waits_for_a_score_past_its_deadline(tmp_path, max_lag):
    """Every attempt takes 0.08 s, nothing else takes any time, and the answers never come."""
    plan = make_plan(max_lag=max_lag, steps=5)
    pipeline, trainer, sink = run(
        tmp_path,
        plan,
        Teacher(seconds=1e6, deadline_s=2.0, concurrency=100),
        engines=lambda: [ScriptedEngine(script=lambda r: np.arange(8, dtype=np.int32), token_s=0.01)],
        trainer=lambda: RecordingTrainer(token_s=0.0),
    )
    waits = np.diff([0.0, *trainer.step_at])
    assert waits.max() <= 2.0 + 0.08 + 1e-6
    assert pipeline.state.missing_scores == {"teacher: late": 5 * 2 * 3}
    assert len(trainer.counts) == 5 * 2 * 3
    (warning,) = sink.of("warning")
    assert "waited 2 s for teacher to score group" in warning["text"]
    # Groups without an answer are held for exactly the deadline.
    role = scoring(sink)["counters"]
    assert role["held_s"] == pytest.approx(2.0 * role["groups"])


class TooShort(Teacher):
    def answer(self, episodes):
        return super().answer(episodes)[:-1]


class NotANumber(Teacher):
    def answer(self, episodes):
        (column,) = super().answer(episodes)
        column.logprobs[0][0] = np.nan
        return [column]


class ManyVersions(Teacher):
    def answer(self, episodes):
        return [replace(column, versions=np.arange(2, dtype=np.int32)) for column in super().answer(episodes)]


class Dead(Teacher):
    def answer(self, episodes):
        raise RoleError("teacher-0 died")


class Broken(Teacher):
    def answer(self, episodes):
        raise ValueError("no such tensor")


class Mistaken(Teacher):
    def answer(self, episodes):
        return [
            ScoreColumn(source=self.name, group=e.group, attempt=e.attempt + 1, rewards={}) for e in episodes
        ]


@pytest.mark.parametrize(
    ("teacher", "why", "words"),
    [
        (TooShort, "invalid", "0 columns for 1 attempts"),
        (NotANumber, "invalid", "not finite"),
        (Mistaken, "invalid", "was asked about"),
        (ManyVersions, "invalid", "2 versions of it for 1 scores"),
        (Dead, "dead", "teacher-0 died"),
        (Broken, "failed", "no such tensor"),
    ],
)
def test_a_fault_is_named_and_counted_and_stops_nothing_else(tmp_path, teacher, why, words):
    pipeline, trainer, sink = run(tmp_path, make_plan(), teacher())
    assert pipeline.state.step == 6
    assert pipeline.state.missing_scores == {f"teacher: {why}": 36}
    assert sink.of("step")[-1]["missing_scores"][f"teacher: {why}"] > 0
    assert set(trainer.counts.values()) == {1}
    assert words in sink.of("warning")[0]["text"]
    assert len(sink.of("warning")) == 1


def test_a_group_without_a_required_score_is_dropped_as_failed(tmp_path):
    class Partly(Teacher):
        def answer(self, episodes):
            if episodes[0].group in (2, 5):
                raise ValueError("no such tensor")
            return super().answer(episodes)

    pipeline, trainer, sink = run(tmp_path, make_plan(), Partly(required=True))
    assert [(d["group"], d["reason"]) for d in sink.of("drop")] == [(2, "failed"), (5, "failed")]
    assert "no such tensor" in sink.of("drop")[0]["detail"]
    assert "2/0" not in trainer.counts
    pipeline.state.ledger.check()


def test_a_required_score_that_is_late_drops_its_group_and_says_so(tmp_path):
    class Slow(Teacher):
        async def score(self, task, episodes):
            await asyncio.sleep(100.0 if episodes[0].group == 1 else 0.0)
            return await super().score(task, episodes)

    _, _, sink = run(tmp_path, make_plan(), Slow(required=True, deadline_s=3.0))
    (drop,) = sink.of("drop")
    assert (drop["group"], drop["reason"]) == (1, "failed")
    assert "waited 3 s for teacher" in drop["detail"]


def test_a_reward_that_is_no_number_drops_its_group_and_is_named(tmp_path):
    class Odd(ParityScorer):
        async def score(self, task, episodes):
            rewards = await super().score(task, episodes)
            return [{"even": float("nan")} if task.id == "4" else r for r in rewards]

    _, _, sink = run(tmp_path, make_plan(), Teacher(), scorer=Odd)
    (drop,) = sink.of("drop")
    assert (drop["group"], drop["reason"]) == (4, "failed")
    assert "a reward is not finite ({'even': nan})" in drop["detail"]


def test_a_group_that_grows_too_old_is_replaced_at_once_though_its_scores_are_still_awaited(tmp_path):
    class Slow(ParityScorer):
        async def score(self, task, episodes):
            await asyncio.sleep(500.0 if task.id == "1" else 0.0)
            return await super().score(task, episodes)

    pipeline, trainer, sink = run(tmp_path, make_plan(staleness="drop", steps=8), Teacher(), scorer=Slow)
    assert (sink.of("drop")[0]["group"], sink.of("drop")[0]["reason"]) == (1, "stale")
    assert trainer.step_at[-1] < 50.0
    pipeline.state.ledger.check()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives=st.lists(st.floats(0.0, 2.0), max_size=4), policy=st.sampled_from(["pace", "drop"]))
def test_what_is_in_the_journal_is_not_asked_for_again(lives, policy):
    """Killed at random moments: only questions that were under way are put again."""
    plan = make_plan(steps=4, staleness=policy, max_lag=1)

    async def one_life(run_dir, life_s):
        teacher = Teacher(seconds=0.07)
        pipeline = make_pipeline(
            run_dir,
            plan,
            engines=[ScriptedEngine(script=hashed_script(mean_tokens=12), token_s=0.02)],
            trainer=(trainer := ScriptedTrainer(token_s=0.002)),
            sources=[teacher],
        )
        before = {
            (g, a) for g, live in pipeline.state.groups.items() for a in live.columns.get("teacher", {})
        }
        task = asyncio.ensure_future(pipeline.run())
        done, _ = await asyncio.wait({task}, timeout=life_s)
        assert not before & set(teacher.asked)
        if done:
            return task.result(), trainer
        pipeline._journal.flush = lambda: None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    with tempfile.TemporaryDirectory() as name:
        for life_s in (*lives, None):
            ended = virtual_clock.run(one_life(Path(name), life_s))
            if ended is not None:
                break
    state, trainer = ended
    assert state.step == 4
    assert set(trainer.counts.values()) == {1}
    state.ledger.check()


def test_missing_scores_are_still_counted_after_a_resume(tmp_path):
    run(tmp_path, make_plan(steps=3), Broken())
    pipeline, _, _ = run(tmp_path, make_plan(steps=6), Teacher())
    assert pipeline.state.missing_scores == {"teacher: failed": 3 * 2 * 3}


def test_scoring_is_hidden_behind_generation(tmp_path):
    """The scenario of docs/scoring.md: a teacher that works as long as the engine, lag 1."""
    _, _, sink = run(
        tmp_path,
        make_plan(steps=20, groups_per_step=4, group_size=4, max_lag=1, checkpoint_every=0),
        Teacher(seconds=0.1),
        engines=lambda: [ScriptedEngine(script=hashed_script(mean_tokens=40), token_s=0.02)],
        environment=lambda: OneTurn(max_tokens=100),
        trainer=lambda: ScriptedTrainer(token_s=0.0005),
    )
    role = scoring(sink)
    assert role["counters"]["teacher_s"] == pytest.approx(0.1 * 320, rel=0.02)
    assert hidden_share(role["seconds"]) >= 0.9


@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_the_source_that_holds_groups_up_is_told_by_the_time_it_is_exposed(tmp_path, seconds):
    """Questions of one source overlap and are counted once; scores that cost no time hold nobody up."""
    _, _, sink = run(
        tmp_path,
        make_plan(steps=4, max_lag=0),
        Teacher(seconds=seconds, concurrency=100),
        trainer=lambda: ScriptedTrainer(token_s=0.0),
    )
    role = scoring(sink)
    counters, exposed_s = role["counters"], role["seconds"]["scoring-exposed"]
    assert counters.get("outcome_exposed_s", 0.0) == 0.0
    assert counters.get("teacher_exposed_s", 0.0) == pytest.approx(exposed_s)
    assert exposed_s == pytest.approx(4 * seconds, rel=0.1)
