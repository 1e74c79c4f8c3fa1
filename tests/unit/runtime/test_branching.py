"""Branch groups in a whole run: counted, bounded in age, journalled, and never of two versions."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from harness import CountingTasks, MemorySink, make_pipeline, make_plan
from hypothesis import given
from hypothesis import strategies as st

from headrace import wire
from headrace.algos.pivots import PivotRule, SuccessModel
from headrace.data.steps import StepRule
from headrace.engines.scripted import ScriptedEngine, hashed_script
from headrace.plan import virtual_clock
from headrace.runtime.batches import make_batch
from headrace.runtime.buffer import ReadyGroup, RolloutBuffer
from headrace.runtime.groups import ready_group
from headrace.runtime.pivots import PivotMemory, find_pivots, start_versions
from headrace.runtime.plan import ProcessPlan
from headrace.runtime.router import Router
from headrace.runtime.staleness import decide
from headrace.runtime.state import RunState
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import (
    Completion,
    Episode,
    EpisodeGroup,
    RoleStatus,
    Sampling,
    StepScores,
    Task,
    Trajectory,
    Turn,
)

RULE = PivotRule(branches=4, segment_tokens=2, per_group=2)


class Branching1:
    """The smallest environment that knows pivots."""

    def __init__(self, max_tokens=32):
        self._sampling = Sampling(max_tokens=max_tokens)

    async def run(self, task, policy):
        prompt, sampling = np.array([int(task.id.partition("@")[0])], np.int32), self._sampling
        if task.pivot is not None:
            prompt = task.pivot.token_ids
            sampling = replace(sampling, max_tokens=sampling.max_tokens - len(task.pivot.prefix_ids))
        return (Trajectory(turns=(await policy.sample(prompt, sampling),), text=""),)


class LastTokenScorer:
    """Rewards 1 for an even last token."""

    async def score(self, task, episodes):
        return [
            {"even": float(e.trajectories[0].turns[0].completion.token_ids[-1] % 2 == 0)} for e in episodes
        ]

    async def close(self): ...


class Recording(ScriptedEngine):
    """Remembers what it was asked."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.requests, self.released = [], []

    async def generate(self, request, on_progress=None):
        self.requests.append(request)
        return await super().generate(request, on_progress)

    async def release(self, request_ids):
        self.released += request_ids


class Keeping(ScriptedTrainer):
    """Remembers its batches."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.batches = []

    async def step(self, batch):
        self.batches.append(batch)
        return await super().step(batch)


class FirstTokenJudge:
    """A step is worth the id of its first token."""

    async def score_steps(self, question):
        starts = [question.num_prompt, *question.ends.tolist()[:-1]]
        scores = question.token_ids[starts][question.num_known :] if len(question.ends) else []
        return StepScores(scores=np.array(scores, np.float32))

    async def status(self):
        return RoleStatus(role="process", version=0, progress=0, seconds={})

    async def close(self): ...


def run(tmp_path, plan, *, stop_after_s=None, process=None, **engine):
    """Returns (state, trainer, sink, engine, tasks asked for)."""

    async def main():
        asked = []

        class Tasks(CountingTasks):
            def task(self, index):
                asked.append(index)
                return super().task(index)

        made = Recording(token_s=0.02, **engine)
        trainer, sink = Keeping(), MemorySink()
        pipeline = make_pipeline(
            tmp_path, plan, engines=[made], trainer=trainer, sink=sink,
            environment=Branching1(), scorer=LastTokenScorer(), process=process,
        )  # fmt: skip
        pipeline._tasks = Tasks()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, pipeline.request_stop)
        return await pipeline.run(), trainer, sink, made, asked

    return virtual_clock.run(main())


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("mode", ["never", "drain", "abort", "block"])
def test_branch_groups_ride_along_and_every_bound_holds(tmp_path, max_lag, mode):
    plan = make_plan(max_lag=max_lag, interrupt=mode, steps=12, pivots=RULE)
    state, trainer, sink, _, asked = run(tmp_path, plan)
    assert state.step == 12 and state.num_trained_groups == 24
    assert max(trainer.lags) <= max_lag
    assert set(trainer.counts.values()) == {1}
    # Tasks are taken in order, whatever branch groups lie between.
    assert asked == list(range(len(asked)))
    samples = [s for batch in trainer.batches for s in batch.samples]
    branches = [s for s in samples if s.component == "pivot"]
    assert branches and len(samples) - len(branches) == 24 * plan.group_size
    for batch in trainer.batches:
        main = {s.group for s in batch.samples if s.component == "main"}
        assert len(main) == plan.groups_per_step
        for group in {s.group for s in batch.samples} - main:
            versions = {int(s.versions[s.loss_mask][0]) for s in batch.samples if s.group == group}
            assert len(versions) == 1
    state.ledger.check()
    assert sum("pivot_groups" in step for step in sink.of("step")) > 0


def test_only_the_branch_is_trained_and_it_is_compared_with_its_siblings(tmp_path):
    plan = make_plan(max_lag=0, steps=6, pivots=RULE)
    _, trainer, _, engine, _ = run(tmp_path, plan)
    by_id = {r.id: r for r in engine.requests}
    groups = {}
    for batch in trainer.batches:
        for sample in batch.samples:
            if sample.component == "pivot":
                groups.setdefault(sample.group, []).append(sample)
    assert groups
    for group, samples in groups.items():
        assert len(samples) == RULE.branches
        fork = by_id[f"{group}/0/0"].fork
        for sample in samples:
            assert int(np.argmax(sample.loss_mask)) == fork.num_tokens
            np.testing.assert_array_equal(
                sample.token_ids[: fork.num_tokens], samples[0].token_ids[: fork.num_tokens]
            )
        advantages = [float(s.advantages[-1]) for s in samples]
        assert sum(advantages) == pytest.approx(0.0, abs=1e-5)


def test_where_steps_are_judged_branches_leave_before_the_worst_one(tmp_path):
    steps = ProcessPlan(rule=StepRule(kind="tokens", num_tokens=2), deadline_s=2.0)
    plan = make_plan(steps=6, pivots=RULE, process=steps, drop_zero_variance=False)
    _, trainer, _, engine, _ = run(
        tmp_path, plan, process=FirstTokenJudge(), script=hashed_script(mean_tokens=24)
    )
    roots = {f"{s.group}/{s.attempt}/0": s.token_ids[s.loss_mask] for b in trainer.batches for s in b.samples}
    forks = [(r.fork.request_id, len(r.prompt_ids) - 1) for r in engine.requests if r.fork is not None]
    worst = [2 * int(np.argmin(roots[root][::2])) for root, _ in forks if root in roots]
    kept = [num_kept for root, num_kept in forks if root in roots]
    bounded = [(n, most) for n, most in zip(kept, worst, strict=True) if most > 0]
    assert len(bounded) > 10 and all(n <= most for n, most in bounded)


def test_synchronous_branches_leave_what_the_same_weights_computed(tmp_path):
    _, _, _, engine, _ = run(tmp_path, make_plan(max_lag=0, steps=6, pivots=RULE))
    by_id = {r.id: r for r in engine.requests}
    forked = [r for r in engine.requests if r.fork is not None]
    assert forked and all(by_id[r.fork.request_id].hold_s > 0 for r in forked)
    # Every hold is let go of: at once where nobody branches off, else when the branches have ended.
    assert {r.id for r in engine.requests if r.hold_s > 0} == set(engine.released)


def test_a_killed_run_knows_its_pivots_and_outcomes(tmp_path):
    plan = make_plan(max_lag=1, steps=14, pivots=RULE, checkpoint_every=3)
    state, *_ = run(tmp_path, plan, stop_after_s=3.0)
    assert 0 < state.step < 14 and state.pivots.depths
    state, trainer, _, _, asked = run(tmp_path, plan)
    assert state.step == 14 and state.num_trained_groups == 28
    assert asked == list(range(asked[0], asked[0] + len(asked)))
    assert max(trainer.lags) <= 1
    state.ledger.check()
    assert len(state.pivots.depths) == len(state.pivots.successes)


class SeldomScorer(LastTokenScorer):
    """So that many groups tell nothing, and pivots wait for room."""

    async def score(self, task, episodes):
        last = [e.trajectories[0].turns[0].completion.token_ids[-1] for e in episodes]
        return [{"even": float(token % 6 == 0)} for token in last]


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("orderly", [False, True], ids=["killed", "stopped"])
def test_a_run_whose_pivots_wait_goes_on_after_any_end(tmp_path, orderly, max_lag):
    plan = make_plan(max_lag=max_lag, steps=8, pivots=RULE, drop_zero_variance=True)

    async def life(directory, ends_after=None):
        engine, trainer = ScriptedEngine(token_s=0.02), ScriptedTrainer(token_s=0.002)
        pipeline = make_pipeline(
            directory,
            plan,
            engines=[engine],
            trainer=trainer,
            environment=Branching1(),
            scorer=SeldomScorer(),
        )
        if ends_after is not None and orderly:
            asyncio.get_running_loop().call_later(ends_after, pipeline.request_stop)
        running = asyncio.ensure_future(pipeline.run())
        if ends_after is None or orderly:
            return await running
        await asyncio.wait({running}, timeout=ends_after)
        pipeline._journal.flush = lambda: None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return None

    for moment in range(1, 13):
        directory = tmp_path / str(moment)
        directory.mkdir()
        virtual_clock.run(life(directory, ends_after=moment * 0.17))
        assert virtual_clock.run(life(directory)).step == 8


def test_branches_that_began_under_two_versions_are_dropped_by_name(tmp_path):
    """The first branch of every group begins a version earlier than its siblings."""

    class Mixed(Recording):
        def _sampled(self, request, done, chunk):
            part = super()._sampled(request, done, chunk)
            first = request.fork is not None and request.id.split("/")[1] == "0"
            return replace(part, versions=part.versions - 1) if first else part

    async def main():
        sink = MemorySink()
        pipeline = make_pipeline(
            tmp_path, make_plan(max_lag=1, steps=4, pivots=RULE), engines=[Mixed()], trainer=Keeping(),
            environment=Branching1(), scorer=LastTokenScorer(), sink=sink,
        )  # fmt: skip
        return await pipeline.run(), sink

    state, sink = virtual_clock.run(main())
    assert state.step == 4
    drops = [d for d in sink.of("drop") if d["reason"] == "stale"]
    assert drops and all("began under versions" in d["detail"] for d in drops)


def test_an_environment_that_ignores_pivots_loses_only_the_branch_groups(tmp_path):
    from harness import OneTurn

    class Deaf(OneTurn):
        async def run(self, task, policy):
            return await super().run(replace(task, id=task.id.partition("@")[0]), policy)

    async def main():
        sink = MemorySink()
        plan = make_plan(steps=4, pivots=RULE, error_budget=1.0)
        pipeline = make_pipeline(tmp_path, plan, environment=Deaf(), scorer=LastTokenScorer(), sink=sink)
        return await pipeline.run(), sink

    state, sink = virtual_clock.run(main())
    assert state.step == 4 and state.num_trained_groups == 8
    assert {d["reason"] for d in sink.of("drop")} <= {"failed", "cancelled"}
    assert any("begins at a pivot" in d["detail"] for d in sink.of("drop"))


def episode(attempt, length, *, group=3, version=0):
    completion = Completion(
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, version, np.int32),
        finish_reason="stop",
        kv_versions=np.array([[version, 2 + length - 1]], np.int32),
    )
    turn = Turn(
        prompt_ids=np.array([50, 51], np.int32), completion=completion, sampling=Sampling(max_tokens=20), seed=0,
        engine="engine-0",
    )  # fmt: skip
    task = Task(id="t", prompt="?", columns={"answer": 1})
    return Episode(
        group=group, attempt=attempt, task=task, trajectories=(Trajectory(turns=(turn,), text=""),)
    )


def test_pivots_are_of_failed_attempts_and_carry_where_to_leave():
    episodes = [episode(a, 9) for a in range(4)]
    tasks = find_pivots(episodes, [1.0, 0.0, 1.0, 0.5], RULE, SuccessModel(), seed=0)
    assert {task.pivot.fork.request_id for task in tasks} == {"3/1/0", "3/3/0"}
    for task in tasks:
        pivot = task.pivot
        assert pivot.fork.num_tokens == len(pivot.token_ids) == 2 + len(pivot.prefix_ids)
        assert pivot.fork.version == 0 and pivot.depth == len(pivot.prefix_ids) / 9
        assert task.columns == {"answer": 1} and task.id.startswith("t@3/")
    assert find_pivots(episodes, [1.0] * 4, RULE, SuccessModel(), seed=0) == []
    assert len(find_pivots(episodes, [0.0] * 4, RULE, SuccessModel(), seed=0)) == RULE.per_group
    assert start_versions([episode(0, 3), episode(1, 3, version=2)]) == [0, 2]


def test_a_branch_is_as_overlong_as_what_it_goes_on_from_makes_it(tmp_path):
    task, *_ = find_pivots([episode(0, 9)], [0.0], RULE, SuccessModel(), seed=0)
    branch = replace(episode(0, 9 - len(task.pivot.prefix_ids)), task=task)

    async def main():
        plan = make_plan(pivots=RULE, max_tokens=10, overlong_buffer_tokens=4)
        runner = make_pipeline(tmp_path, plan)._runner
        return runner._overlong(branch), runner._overlong(episode(0, 9))

    assert virtual_clock.run(main()) == (-0.75, -0.75)


def test_rows_of_two_versions_are_never_taken_for_one():
    mixed = episode(0, 9)
    turn = mixed.trajectories[0].turns[0]
    kv = np.array([[0, 3], [1, 7]], np.int32)
    turn = replace(turn, completion=replace(turn.completion, kv_versions=kv))
    mixed = replace(mixed, trajectories=(Trajectory(turns=(turn,), text=""),))
    (task,) = find_pivots([mixed], [0.0], replace(RULE, per_group=1), SuccessModel(), seed=0)
    assert task.pivot.fork.version == -1


def test_memory_is_a_fold_that_survives_a_checkpoint():
    state = RunState()
    tasks = find_pivots([episode(a, 9) for a in range(4)], [0.0] * 4, RULE, SuccessModel(), seed=0)
    state.apply({"kind": "pivots", "tasks": tasks, "room": 1})
    state.apply({"kind": "explored", "depth": 0.25, "success": True})
    assert len(state.pivots.waiting) == 1 and state.pivots.num_discarded == 1
    again = RunState.restore(wire.decode(wire.encode(state.snapshot())))
    assert again.pivots.depths == [0.25] and again.pivots.successes == [True]
    assert [t.id for t in again.pivots.waiting] == [tasks[1].id]
    again.apply({"kind": "admit", "group": 0, "task": again.pivots.waiting[0], "attempts": 4, "version": 0})
    assert again.pivots.waiting == [] and again.next_group == 1 and again.next_task == 0


def test_the_window_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr("headrace.runtime.pivots.WINDOW", 3)
    memory = PivotMemory()
    for i in range(5):
        memory.explored(i / 10, bool(i % 2))
    assert memory.depths == [0.2, 0.3, 0.4] and memory.successes == [False, True, False]


def test_whitening_keeps_branches_apart():
    def ready(group, branch):
        task = Task(id="t", prompt="?")
        if branch:
            (task,) = find_pivots([episode(0, 9)], [0.0], replace(RULE, per_group=1), SuccessModel(), seed=0)
        scored = EpisodeGroup(
            group=group,
            task=task,
            episodes=tuple(replace(episode(a, 4, group=group), task=task) for a in range(2)),
            returns=(0.0, 9.0) if branch else (0.0, 1.0),
        )
        return ready_group(make_plan(advantage="reinforce++"), scored)

    groups = [ready(0, False), ready(1, True)]
    assert [g.is_branch for g in groups] == [False, True]
    alone = make_batch([groups[0]], step=1, version=0, advantage="reinforce++")
    both = make_batch(groups, step=1, version=0, advantage="reinforce++")
    assert [s.group for s in both.samples] == [0, 0, 1, 1]
    for a, b in zip(alone.samples, both.samples, strict=False):
        np.testing.assert_array_equal(a.advantages, b.advantages)


def test_branches_that_begin_beside_a_step_are_for_the_next_one():
    """A batch that is taken takes no more of them, so what they may not be older than is the version after it."""

    async def main():
        buffer = RolloutBuffer(make_plan(groups_per_step=1), lambda: {})
        taking = asyncio.ensure_future(buffer.take(3, on_stale=lambda group: None, progress=lambda: 0))
        await asyncio.sleep(0)
        assert buffer.next_version == 3
        buffer.put(ReadyGroup(group=0, samples=(), oldest_version=3, mean_return=0.0))
        await taking
        assert buffer.next_version == 4

    virtual_clock.run(main())


def test_a_bound_group_stays_with_its_engine():
    class Named:
        def __init__(self, name):
            self.name = name

    router = Router([Named("a"), Named("b")], affinity=1)
    router.bind(7, "b")
    assert {router.lease(7, f"7/{i}/0").name for i in range(9)} == {"b"}
    router.bind(8, "gone")
    assert router.lease(8, "8/0/0").name == "a"


@given(
    max_lag=st.integers(0, 4),
    groups_per_step=st.integers(1, 4),
    choices=st.lists(st.integers(0, 10**6), min_size=1, max_size=300),
)
def test_with_branches_pace_never_strands_a_group(max_lag, groups_per_step, choices):
    """As for ordinary groups alone: random orders of finishing, landing and pivots found."""
    capacity = (max_lag + 1) * groups_per_step
    trainer = engines = 0
    unfinished, buffered, branches, landing = {}, {}, set(), []
    held = held_branches = next_group = 0
    for choice in choices:
        while held < capacity:
            unfinished[next_group] = engines
            next_group, held = next_group + 1, held + 1
        may_branch = held_branches < capacity and trainer - engines <= max_lag
        moves = ["step"] + ["finish"] * bool(unfinished) + ["land"] * bool(landing) + ["branch"] * may_branch
        move = moves[choice % len(moves)]
        if move == "finish":
            group = sorted(unfinished)[choice // 7 % len(unfinished)]
            buffered[group] = unfinished.pop(group)
        elif move == "branch":
            unfinished[next_group] = engines
            branches.add(next_group)
            next_group, held_branches = next_group + 1, held_branches + 1
        elif move == "land":
            engines, num_branches = landing.pop(0)
            held -= groups_per_step
            held_branches -= num_branches
        else:
            decision = decide(
                buffered, unfinished, version=trainer, groups_per_step=groups_per_step, max_lag=max_lag,
                policy="pace", branches=branches,
            )  # fmt: skip
            assert not decision.drop
            if decision.take is None:
                assert unfinished or len(buffered.keys() - branches) < groups_per_step
                continue
            assert len(set(decision.take) - branches) == groups_per_step
            assert not buffered.keys() & branches - set(decision.take)
            for group in decision.take:
                assert trainer - buffered.pop(group) <= max_lag
            trainer += 1
            landing.append((trainer, len(branches.intersection(decision.take))))


def test_a_ready_group_is_an_ordinary_one_unless_it_says_otherwise():
    assert not ReadyGroup(group=0, samples=(), oldest_version=0, mean_return=0.0).is_branch
