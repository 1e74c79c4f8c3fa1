"""Teachers: who is asked about which task, what their answers are checked for, and weights that follow late."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from harness import CountingTasks, MemorySink, make_pipeline, make_plan

from headrace.engines.scripted import ScriptedEngine
from headrace.errors import DeadlineError, ModelError, RewardError, TaskError, WeightSyncError
from headrace.plan import virtual_clock
from headrace.runtime.snapshots import DelayedWeights
from headrace.runtime.teachers import Teacher, Teachers
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import (
    NO_KV,
    Completion,
    Episode,
    Sampling,
    SamplingMask,
    Task,
    Trajectory,
    Turn,
    WeightManifest,
)


class TeacherEngine(ScriptedEngine):
    """Answers with its number for every token, and counts what it is asked."""

    def __init__(self, number: float = -1.0, *, seconds: float = 0.0) -> None:
        super().__init__(f"teacher{number:g}")
        self.number, self.num_asked, self.applied = number, 0, []
        self._seconds = seconds

    async def score(self, token_ids, *, temperature=1.0, policy="policy"):
        self.num_asked += len(token_ids)
        await asyncio.sleep(self._seconds)
        return [np.full(len(ids), self.number / temperature, np.float32) for ids in token_ids]

    async def apply(self, manifest):
        self.applied.append(manifest.version)
        return await super().apply(manifest)


class RecordingTrainer(ScriptedTrainer):
    """Keeps the batches it was given and the versions it was told to forget."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.samples, self.retired = [], []

    async def step(self, batch):
        self.samples.extend(batch.samples)
        return await super().step(batch)

    async def retire(self, version):
        self.retired.append(version)
        await super().retire(version)


class TaughtTasks(CountingTasks):
    """Task n has the n-th of these in its column, None: no column."""

    def __init__(self, *chosen: str | None) -> None:
        self._chosen = chosen

    def task(self, index):
        task, name = super().task(index), self._chosen[index % len(self._chosen)]
        return task if name is None else replace(task, columns={**task.columns, "teacher": name})


def of(*engines: TeacherEngine, top_k: int = 0, **settings) -> Teachers:
    names = ("first", "second", "third")
    made = {name: Teacher(engine) for name, engine in zip(names, engines, strict=False)}
    return Teachers(made, top_k=top_k, deadline_s=settings.pop("deadline_s", 5.0), **settings)


def episode(ids: list[int], *, temperature: float = 1.0, teacher: str | None = None) -> Episode:
    completion = Completion(
        token_ids=np.array(ids[1:], np.int32),
        logprobs=np.zeros(len(ids) - 1, np.float32),
        versions=np.zeros(len(ids) - 1, np.int32),
        finish_reason="stop",
        kv_versions=NO_KV,
    )
    turn = Turn(
        prompt_ids=np.array(ids[:1], np.int32),
        completion=completion,
        sampling=Sampling(max_tokens=8, temperature=temperature),
        seed=0,
        engine="engine-0",
    )
    task = Task(id="t", prompt="p", columns={} if teacher is None else {"teacher": teacher})
    return Episode(group=3, attempt=0, task=task, trajectories=(Trajectory(turns=(turn,), text=""),))


def manifest(version: int) -> WeightManifest:
    return WeightManifest(
        version=version, base_version=None, kind="full", transport="none", location="", num_bytes=0, digest="",
        slots=(),
    )  # fmt: skip


def test_every_task_is_scored_by_its_own_teacher(tmp_path):
    async def main():
        trainer, engines = RecordingTrainer(), (TeacherEngine(-1.0), TeacherEngine(-2.0))
        tasks = TaughtTasks(None, "second", "first", "none")
        await make_pipeline(tmp_path, make_plan(), trainer=trainer, teachers=of(*engines), tasks=tasks).run()
        return trainer, engines

    trainer, engines = virtual_clock.run(main())
    assert len(trainer.samples) == 6 * 2 * 3
    wanted = {0: ("first", -1.0), 1: ("second", -2.0), 2: ("first", -1.0)}
    for sample in trainer.samples:
        if sample.group % 4 == 3:
            assert sample.teacher is None
            continue
        name, number = wanted[sample.group % 4]
        assert sample.teacher.teacher == name and sample.teacher.top_ids is None
        assert sample.teacher.logprobs.shape == sample.token_ids.shape
        assert (sample.teacher.logprobs == number).all()
    assert [engine.num_asked for engine in engines] == [18, 9]


def test_entries_and_temperatures_are_those_that_were_asked_for():
    async def main():
        teachers = of(ScriptedEngine(), top_k=3, vocab_size=6)
        return await teachers.scores(3, [episode([1, 2, 5, 4]), replace(episode([1, 3]), attempt=1)])

    first, second = asyncio.run(main())
    assert first.top_ids.shape == (4, 3) and second.top_ids.shape == (2, 3)
    # The student has no tokens from 6 on: they count to the rest.
    assert first.top_ids[2].tolist() == [5, 0, 0]
    assert np.isneginf(first.top_logprobs[2]).tolist() == [False, True, True]
    assert np.isfinite(second.top_logprobs[1]).all()


@pytest.mark.parametrize(
    ("asked", "settings", "error", "says"),
    [
        (episode([1, 2], teacher="fourth"), {}, TaskError, r"task t: .*'fourth'.*distill\.teachers"),
        (episode([1, 9]), {"limit": 9}, ModelError, r"'first' has 9 tokens and cannot score token 9"),
        (episode([1, 2]), {"answer": lambda n: np.zeros(n + 1)}, ModelError, r"3 scores for 2 tokens of group 3"),
        (episode([1, 2]), {"answer": lambda n: np.full(n, np.nan)}, ModelError, "no log-probabilities"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_group_is_named(asked, settings, error, says):
    class Odd(TeacherEngine):
        async def score(self, token_ids, *, temperature=1.0, policy="policy"):
            answer = settings.get("answer", lambda n: np.zeros(n))
            return [answer(len(ids)).astype(np.float32) for ids in token_ids]

    async def main():
        teachers = Teachers({"first": Teacher(Odd(), settings.get("limit"))}, top_k=0, deadline_s=1.0)
        await teachers.scores(3, [asked])

    with pytest.raises(error, match=says):
        asyncio.run(main())


def test_tokens_are_valued_over_the_sets_they_were_drawn_from():
    """Without the ids that the teacher does not have."""
    asked = []

    class Listening(TeacherEngine):
        async def score(self, token_ids, *, temperature=1.0, policy="policy", masks=None):
            asked.append(masks)
            return await super().score(token_ids, temperature=temperature)

    kept = SamplingMask(token_ids=np.array([2, 9, 1, 3], np.int32), offsets=np.array([0, 2, 4], np.int64))
    free = episode([1, 2, 3])
    (trajectory,) = free.trajectories
    turn = trajectory.turns[0]
    cut = replace(turn, completion=replace(turn.completion, sampling_mask=kept))
    cut = replace(free, trajectories=(replace(trajectory, turns=(cut,)),))

    async def ask() -> None:
        teachers = Teachers({"first": Teacher(Listening(), vocab_size=8)}, top_k=0, deadline_s=5.0)
        await teachers.scores(0, [free])
        await teachers.scores(0, [cut])

    asyncio.run(ask())
    first, (mask,) = asked
    assert first is None
    assert mask.offsets.tolist() == [0, 0, 1, 3] and mask.token_ids.tolist() == [2, 1, 3]


def test_such_a_group_is_dropped_and_counted_and_stops_nothing_else(tmp_path):
    async def main():
        trainer, sink = RecordingTrainer(), MemorySink()
        tasks, plan = TaughtTasks(*[None] * 6, "unheard"), make_plan(error_budget=0.5)
        pipeline = make_pipeline(
            tmp_path, plan, trainer=trainer, teachers=of(TeacherEngine()), tasks=tasks, sink=sink
        )
        await pipeline.run()
        return trainer, sink, pipeline.books()

    trainer, sink, books = virtual_clock.run(main())
    assert len(trainer.samples) == 6 * 2 * 3
    (drop,) = [fields for fields in sink.of("drop") if fields["reason"] == "failed"]
    assert drop["group"] == 6 and "'unheard'" in drop["detail"]
    assert books["attempts"]["dropped:failed"] == 3


def test_groups_of_equal_rewards_are_dropped_only_where_nobody_teaches(tmp_path):
    class Equal:
        async def score(self, task, episodes):
            return [{"equal": 1.0} for _ in episodes]

        async def close(self): ...

    async def main():
        trainer, sink = RecordingTrainer(), MemorySink()
        pipeline = make_pipeline(
            tmp_path, make_plan(drop_zero_variance=True), trainer=trainer, teachers=of(TeacherEngine()),
            tasks=TaughtTasks(None, "none"), sink=sink, scorer=Equal(),
        )  # fmt: skip
        await pipeline.run()
        return trainer, sink

    trainer, sink = virtual_clock.run(main())
    assert len(trainer.samples) == 6 * 2 * 3 and all(s.teacher is not None for s in trainer.samples)
    dropped = [drop["group"] for drop in sink.of("drop") if drop["reason"] == "zero-variance"]
    assert dropped and all(group % 2 for group in dropped)


def test_what_the_journal_holds_is_not_asked_for_again(tmp_path):
    async def first_life():
        trainer = ScriptedTrainer(token_s=1e3)
        teachers = of(ScriptedEngine(), top_k=2)
        pipeline = make_pipeline(tmp_path, make_plan(stall_s=1e9), trainer=trainer, teachers=teachers)
        task = asyncio.ensure_future(pipeline.run())
        await asyncio.wait({task}, timeout=100.0)
        pipeline._journal.flush()
        pipeline._journal.flush = lambda: None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def second_life():
        trainer, engine = RecordingTrainer(), TeacherEngine()
        await make_pipeline(tmp_path, make_plan(), trainer=trainer, teachers=of(engine)).run()
        return trainer, engine

    virtual_clock.run(first_life())
    trainer, engine = virtual_clock.run(second_life())
    assert engine.num_asked == 6 * 2 * 3 - 4 * 3
    old = [sample for sample in trainer.samples if sample.group < 4]
    assert all(sample.teacher.top_ids.shape == (sample.num_tokens, 2) for sample in old)


def test_a_teacher_that_never_answers_ends_the_run_when_the_budget_is_spent_and_is_named(tmp_path):
    async def main():
        teachers = of(TeacherEngine(seconds=1e6), deadline_s=7.0)
        await make_pipeline(tmp_path, make_plan(), teachers=teachers).run()

    said = r"4 of \d+ groups failed, over reward.error_budget.* 7 s for teacher-1 to score group \d; .*run\.stall_s"
    with pytest.raises(RewardError, match=said):
        virtual_clock.run(main())


@pytest.mark.parametrize("lag", [1, 3])
def test_a_follower_has_the_weights_so_many_versions_back(lag):
    async def main():
        engine = TeacherEngine()
        follower = DelayedWeights(engine, lag=lag, deadline_s=1.0)
        seen = []
        for version in range(7):
            retired = await follower.landed(manifest(version))
            seen.append((version, follower.version, retired))
        return seen, engine.applied

    seen, applied = asyncio.run(main())
    assert [has for _, has, _ in seen] == [max(version - lag, 0) for version in range(7)]
    assert applied == list(range(7 - lag))
    # The bytes of a version are given back once, when the follower has them or a newer one.
    assert [v for _, _, retired in seen for v in retired] == applied


def test_a_version_that_the_follower_cannot_take_is_named_and_left_out():
    class Torn(TeacherEngine):
        async def apply(self, given):
            if given.version == 2:
                raise WeightSyncError("version 2 is torn; publish it again")
            if given.version == 3:
                await asyncio.sleep(10.0)
            if given.version == 5:
                # The call to another process has a deadline of its own.
                raise DeadlineError("teacher-1 did not answer 'apply' within 600 s; its log may say why")
            return await super().apply(given)

    async def main():
        said = []
        follower = DelayedWeights(Torn(), lag=1, deadline_s=5.0, warn=said.append)
        has = []
        for version in range(7):
            retired = await follower.landed(manifest(version))
            has.append((follower.version, retired))
        return has, said

    has, said = virtual_clock.run(main())
    assert [version for version, _ in has] == [0, 0, 1, 1, 1, 4, 4]
    assert [v for _, retired in has for v in retired] == [0, 1, 2, 3, 4, 5]
    assert len(said) == 3
    assert "teacher-1 goes on with version 4: teacher-1 did not answer" in said[2]
    assert "teacher-1 goes on with version 1: version 2 is torn" in said[0]
    assert "took over 5 s for version 3" in said[1] and "run.stall_s" in said[1]


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_run_with_a_snapshot_of_itself(tmp_path, max_lag):
    """Scores say which version they are of, it lags as asked, and no other engine is given anything twice."""

    class Rollouts(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.applied = []

        async def apply(self, given):
            self.applied.append(given.version)
            return await super().apply(given)

    async def main():
        engine, trainer, rollouts = TeacherEngine(), RecordingTrainer(), Rollouts()
        follower = DelayedWeights(engine, lag=2, deadline_s=5.0)
        teachers = Teachers({"snapshot": Teacher(engine, snapshots=follower)}, top_k=0, deadline_s=5.0)
        plan = make_plan(max_lag=max_lag)
        await make_pipeline(tmp_path, plan, engines=[rollouts], trainer=trainer, teachers=teachers).run()
        return engine, trainer, rollouts

    engine, trainer, rollouts = virtual_clock.run(main())
    assert rollouts.applied == list(range(7))
    assert engine.applied == list(range(5)) == trainer.retired
    assert {sample.teacher.teacher for sample in trainer.samples} == {"snapshot"}
    versions = [sample.teacher.version for sample in trainer.samples]
    assert min(versions) == 0 and max(versions) >= 1
    for sample in trainer.samples:
        assert sample.teacher.version <= max(int(sample.versions.max()) - 2 + max_lag, 0)
