from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
from harness import MemorySink, OneTurn, ParityScorer, make_pipeline, make_plan

from headrace.engines.scripted import ScriptedEngine
from headrace.errors import CheckpointError, DeadlineError, PromptTooLongError, RewardError, TaskError
from headrace.plan import virtual_clock
from headrace.runtime.drops import BARREN_STEPS
from headrace.runtime.journal import read
from headrace.trainers.scripted import ScriptedTrainer


def run(tmp_path, plan, **parts):
    """Returns (state, trainer, sink) of a finished run; parts are factories called inside the loop."""

    async def main():
        made = {name: factory() for name, factory in parts.items()}
        made.setdefault("trainer", ScriptedTrainer())
        made.setdefault("sink", MemorySink())
        state = await make_pipeline(tmp_path, plan, **made).run()
        return state, made["trainer"], made["sink"]

    return virtual_clock.run(main())


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("mode", ["never", "drain", "abort", "block"])
def test_every_attempt_is_trained_once_and_lag_is_bounded(tmp_path, max_lag, mode):
    plan = make_plan(max_lag=max_lag, interrupt=mode)
    state, trainer, _ = run(tmp_path, plan)
    assert state.step == plan.steps
    assert set(trainer.counts.values()) == {1}
    assert len(trainer.counts) == plan.steps * plan.groups_per_step * plan.group_size
    assert max(trainer.lags) <= max_lag
    assert state.ledger.attempts()["trained"] == state.ledger.num_admitted
    state.ledger.check()


def test_a_batch_is_described_as_it_was_when_it_was_trained(tmp_path):
    """Though that is done later, when there are newer weights."""
    _, trainer, sink = run(tmp_path, make_plan(max_lag=0))
    steps = sink.of("step")
    assert len(steps) == 6 and set(trainer.lags) == {0}
    assert all(step["lag_mean"] == step["lag_max"] == 0 for step in steps)


def test_attempts_leave_nothing_to_the_garbage_collector(tmp_path):
    """What the controller's loop counts on when it lets the collector look seldom."""

    async def main():
        pipeline = make_pipeline(tmp_path, make_plan(steps=24, checkpoint_every=0))
        gc.collect()
        gc.disable()
        try:
            state = await pipeline.run()
            return gc.collect(), state.ledger.num_admitted
        finally:
            gc.enable()

    num_cyclic, num_attempts = virtual_clock.run(main())
    assert num_cyclic < num_attempts == 24 * 6


def test_a_batch_is_in_the_journal_before_the_trainer_has_it(tmp_path):
    """A controller that is killed while the trainer works must know what it is working on."""

    class Looking(ScriptedTrainer):
        async def step(self, batch):
            records = read(tmp_path / "journal", 0)
            taken.append([r["groups"] for r in records if r["kind"] == "take" and r["step"] == batch.step])
            return await super().step(batch)

    taken = []
    state, _, _ = run(tmp_path, make_plan(checkpoint_every=0), trainer=Looking)
    assert len(taken) == state.step == 6
    assert all(len(groups) == 1 and len(groups[0]) == 2 for groups in taken)


def test_groups_that_have_ended_are_forgotten_by_everybody(tmp_path):
    """Who serves a run of many steps must not remember each of its groups."""

    async def main():
        pipeline = make_pipeline(tmp_path, make_plan(drop_zero_variance=True))
        await pipeline.run()
        return pipeline._runner, pipeline._runner._router

    runner, router = virtual_clock.run(main())
    assert not (router._home or router._leases or router._bound)
    assert not (runner._tasks or runner._stops or runner._settling or runner._released or runner._ending)


def test_lag_1_hides_the_shorter_of_generation_and_training(tmp_path):
    """Generation takes 0.8 of training, so perfect overlap is 1.8 times synchronous."""

    def duration(max_lag):
        async def main():
            engine = ScriptedEngine(script=lambda request: np.arange(8, dtype=np.int32), token_s=0.048)
            pipeline = make_pipeline(
                tmp_path / str(max_lag),
                make_plan(max_lag=max_lag, steps=20, checkpoint_every=0),
                engines=[engine],
                trainer=ScriptedTrainer(token_s=0.01),
            )
            await pipeline.run()
            return asyncio.get_running_loop().time()

        return virtual_clock.run(main())

    assert duration(1) < duration(0) / 1.7


def test_two_engines_share_the_work(tmp_path):
    async def main():
        engines = [ScriptedEngine("engine-0"), ScriptedEngine("engine-1")]
        await make_pipeline(tmp_path, make_plan(groups_per_step=8, steps=4), engines=engines).run()
        return [engine.num_tokens for engine in engines]

    first, second = virtual_clock.run(main())
    assert min(first, second) > 0.3 * max(first, second)


def test_drop_policy_replaces_stale_groups_one_for_one(tmp_path):
    def straggling(request):
        long = request.id.startswith("1/")
        return np.arange(200 if long else 4, dtype=np.int32)

    plan = make_plan(max_lag=1, staleness="drop", steps=8)
    state, trainer, sink = run(
        tmp_path,
        plan,
        engines=lambda: [ScriptedEngine(script=straggling)],
        environment=lambda: OneTurn(max_tokens=400),
    )
    assert [d["reason"] for d in sink.of("drop")] == ["stale"]
    assert state.ledger.attempts()["dropped:stale"] == plan.group_size
    assert 0 < state.ledger.tokens()["dropped:stale"] < 200 * plan.group_size
    assert max(trainer.lags) <= plan.max_lag
    assert len(trainer.counts) == plan.steps * plan.groups_per_step * plan.group_size


def test_pace_policy_waits_for_the_straggler_and_drops_nothing(tmp_path):
    def straggling(request):
        return np.arange(200 if request.id.startswith("1/") else 4, dtype=np.int32)

    plan = make_plan(max_lag=1, staleness="pace", steps=8)
    _, trainer, sink = run(
        tmp_path,
        plan,
        engines=lambda: [ScriptedEngine(script=straggling)],
        environment=lambda: OneTurn(max_tokens=400),
    )
    assert sink.of("drop") == []
    assert trainer.counts["1/0"] == 1
    assert max(trainer.lags) <= plan.max_lag


def test_zero_variance_groups_are_dropped_and_refilled_exactly(tmp_path):
    plan = make_plan(drop_zero_variance=True, group_size=2)
    state, trainer, _ = run(tmp_path, plan)
    dropped = state.ledger.attempts()["dropped:zero-variance"]
    assert dropped > 0
    assert len(trainer.counts) == plan.steps * plan.groups_per_step * plan.group_size
    assert state.ledger.num_admitted == len(trainer.counts) + dropped


class FailingScorer(ParityScorer):
    def __init__(self, failing: set[int]) -> None:
        super().__init__()
        self._failing = failing

    async def score(self, task, episodes):
        if int(task.id) in self._failing:
            raise RewardError(f"no score for task {task.id}")
        return await super().score(task, episodes)


def test_a_failing_reward_drops_its_group_and_the_run_goes_on(tmp_path):
    state, trainer, sink = run(tmp_path, make_plan(), scorer=lambda: FailingScorer({2, 5}))
    assert state.step == 6
    assert state.ledger.attempts()["dropped:failed"] == 6
    assert "2/0" not in trainer.counts
    assert "no score for task 2" in sink.of("drop")[0]["detail"]


def test_failures_over_the_error_budget_stop_the_run_with_the_reason(tmp_path):
    with pytest.raises(RewardError, match=r"error_budget.*no score for task"):
        run(tmp_path, make_plan(), scorer=lambda: FailingScorer(set(range(1000))))


def test_a_resumed_run_starts_with_a_whole_error_budget(tmp_path):
    with pytest.raises(RewardError, match="4 of 7 groups failed"):
        run(tmp_path, make_plan(), scorer=lambda: FailingScorer(set(range(1000))))
    state, _, _ = run(tmp_path, make_plan(), scorer=lambda: FailingScorer({6, 9}))
    assert state.step == 6
    assert state.ledger.attempts()["dropped:failed"] == 6 * 3


def test_a_run_in_which_nothing_moves_says_what_it_waited_for(tmp_path):
    plan = make_plan(stall_s=50, attempt_s=1e6)
    with pytest.raises(DeadlineError, match=r"2 more finished groups"):
        run(tmp_path, plan, scorer=lambda: ParityScorer(seconds=1e6))


def test_an_attempt_over_its_deadline_fails_its_group_only(tmp_path):
    def endless(request):
        return np.arange(10_000 if request.id.startswith("3/1/") else 4, dtype=np.int32)

    state, _, sink = run(
        tmp_path,
        make_plan(attempt_s=5.0),
        engines=lambda: [ScriptedEngine(script=endless)],
        environment=lambda: OneTurn(max_tokens=20_000),
    )
    assert "rollout.attempt_s" in sink.of("drop")[0]["detail"]
    assert state.ledger.attempts()["dropped:failed"] == 3
    state.ledger.check()


class ImpatientEnvironment(OneTurn):
    """Gives up on some tasks by a deadline of its own."""

    async def run(self, task, policy):
        if int(task.id) == 3:
            raise TimeoutError("the tool did not answer")
        return await super().run(task, policy)


def test_a_deadline_of_the_environments_own_is_not_taken_for_the_attempts(tmp_path):
    _, _, sink = run(tmp_path, make_plan(), environment=ImpatientEnvironment)
    (drop,) = sink.of("drop")
    assert drop["detail"].startswith("environment: TimeoutError: the tool did not answer (test_pipeline.py:")


def test_shares_of_every_role_sum_to_its_age(tmp_path):
    _, _, sink = run(tmp_path, make_plan())
    last = sink.of("step")[-1]
    ages = [sum(role["seconds"].values()) for role in last["roles"]]
    assert ages[0] == pytest.approx(ages[1])


def test_stop_saves_everything_and_resume_finishes_the_same_run(tmp_path):
    async def stopped():
        trainer = ScriptedTrainer()
        pipeline = make_pipeline(tmp_path, make_plan(), trainer=trainer)
        asyncio.get_running_loop().call_later(0.35, pipeline.request_stop)
        return await pipeline.run()

    first = virtual_clock.run(stopped())
    assert 0 < first.step < 6
    assert first.ledger.attempts()["generating"] > 0
    state, trainer, _ = run(tmp_path, make_plan())
    assert state.step == 6
    assert set(trainer.counts.values()) == {1}
    assert len(trainer.counts) == 36
    assert state.ledger.num_admitted == 36


def test_a_stop_is_heeded_at_the_next_step_though_the_next_batch_is_ready(tmp_path):
    async def stopped():
        pipeline = make_pipeline(
            tmp_path,
            make_plan(steps=20, max_lag=3),
            engines=[ScriptedEngine(token_s=0.0)],
            trainer=ScriptedTrainer(token_s=1.0),
        )
        asyncio.get_running_loop().call_later(1.0, pipeline.request_stop)
        return await pipeline.run()

    assert virtual_clock.run(stopped()).step == 1


def test_a_run_goes_on_through_any_number_of_barren_groups_that_are_not_in_a_row(tmp_path):
    plan = make_plan(drop_zero_variance=True, group_size=2, steps=60)
    state, _, _ = run(tmp_path, plan)
    assert state.step == plan.steps
    assert state.ledger.attempts()["dropped:zero-variance"] > BARREN_STEPS * plan.groups_per_step * 2


class EqualScorer(ParityScorer):
    async def score(self, task, episodes):
        return [{"equal": 0.5} for _ in episodes]


def test_groups_with_equal_rewards_and_nothing_else_stop_the_run(tmp_path):
    with pytest.raises(RewardError, match=r"40 groups had equal rewards.*rollout\.drop_zero_variance"):
        run(tmp_path, make_plan(drop_zero_variance=True), scorer=EqualScorer)


class ShortContext(OneTurn):
    """Only a few tasks have a prompt that fits."""

    def __init__(self, fitting):
        super().__init__()
        self._fitting = fitting

    async def run(self, task, policy):
        if int(task.id) not in self._fitting:
            raise PromptTooLongError(f"task {task.id} has a prompt of 70 tokens")
        return await super().run(task, policy)


def test_a_prompt_longer_than_the_context_drops_its_own_group_only(tmp_path):
    plan = make_plan()
    state, trainer, sink = run(tmp_path, plan, environment=lambda: ShortContext(set(range(1000)) - {3, 4, 7}))
    assert state.step == plan.steps
    assert [(d["group"], d["reason"]) for d in sink.of("drop")] == [(g, "over-length") for g in (3, 4, 7)]
    assert "70 tokens" in sink.of("drop")[0]["detail"]
    assert state.ledger.attempts()["dropped:over-length"] == 3 * plan.group_size
    assert len(trainer.counts) == plan.steps * plan.groups_per_step * plan.group_size


def test_prompts_that_are_all_too_long_stop_the_run_instead_of_being_tried_for_ever(tmp_path):
    with pytest.raises(TaskError, match=r"40 groups had prompts too long.*70 tokens"):
        run(tmp_path, make_plan(), environment=lambda: ShortContext({0}))


def test_a_sink_that_cannot_write_ends_the_run_with_its_own_error(tmp_path):
    class FullSink(MemorySink):
        def emit(self, event, fields):
            if event == "drop":
                raise CheckpointError("the event file cannot be written")

    with pytest.raises(CheckpointError, match="the event file cannot be written"):
        run(tmp_path, make_plan(drop_zero_variance=True), scorer=EqualScorer, sink=FullSink)


def test_a_resume_says_that_the_journal_ended_in_a_cut_off_record(tmp_path):
    run(tmp_path, make_plan(steps=2))
    last = sorted((tmp_path / "journal").glob("step-*.journal"))[-1]
    with last.open("ab") as journal:
        journal.write(b"\x40\x00\x00\x00torn")
    state, _, sink = run(tmp_path, make_plan(steps=4))
    (warning,) = [event["text"] for event in sink.of("warning")]
    assert f"{last.name} ended in a record that was cut off after 8 bytes" in warning
    assert state.step == 4
    *_, again = run(tmp_path, make_plan(steps=5))
    assert not again.of("warning")
