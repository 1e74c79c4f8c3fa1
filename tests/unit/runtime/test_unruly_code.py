"""Environments and scorers that do what was not foreseen: their group pays for it, and the run goes on."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest
from harness import MemorySink, OneTurn, ParityScorer, make_pipeline, make_plan

from headrace.engines.scripted import ScriptedEngine
from headrace.errors import DeadlineError, PromptTooLongError, RolloutError
from headrace.plan import virtual_clock
from headrace.types import Sampling, Trajectory


def line_of(environment):
    """The first of its ``run``."""
    return environment.run.__code__.co_firstlineno + 1


def prompt(task, length=1):
    return np.array([int(task.id)] * length, np.int32)


def one(*turns):
    return (Trajectory(turns=turns, text=""),)


class OwnDeadline(OneTurn):
    """Gives a turn a moment, and then asks for it again."""

    async def run(self, task, policy):
        try:
            async with asyncio.timeout(0.05):
                return one(await policy.sample(prompt(task), self._sampling))
        except TimeoutError:
            return one(await policy.sample(prompt(task), self._sampling))


class Shortens(OneTurn):
    async def run(self, task, policy):
        try:
            return one(await policy.sample(prompt(task, 10), self._sampling))
        except PromptTooLongError:
            return one(await policy.sample(prompt(task), self._sampling))


class TwoAtOnce(OneTurn):
    async def run(self, task, policy):
        both = [policy.sample(prompt(task), self._sampling) for _ in range(2 if task.id == "2" else 1)]
        return one(*await asyncio.gather(*both))


class ChangesItsMind(OneTurn):
    """Also where it uses one array for all prompts."""

    async def run(self, task, policy):
        shown = prompt(task)
        try:
            async with asyncio.timeout(0.05 if task.id == "2" else None):
                return one(await policy.sample(shown, self._sampling))
        except TimeoutError:
            shown[0] += 1
            return one(await policy.sample(shown, Sampling(max_tokens=4)))


class Awaits(OneTurn):
    """Something that was cancelled elsewhere."""

    async def run(self, task, policy):
        returned = await super().run(task, policy)
        if task.id == "2":
            other = asyncio.create_task(asyncio.sleep(10))
            other.cancel()
            await other
        return returned


class AwaitsScorer(ParityScorer):
    async def score(self, task, episodes):
        if task.id == "2":
            raise asyncio.CancelledError
        return await super().score(task, episodes)


class Picky(ScriptedEngine):
    async def generate(self, request, on_progress=None):
        if len(request.prompt_ids) > 5:
            raise PromptTooLongError("too long")
        return await super().generate(request, on_progress)


def run(tmp_path, **given):
    sink = MemorySink()

    async def whole():
        return await make_pipeline(tmp_path, make_plan(), sink=sink, engines=[Picky()], **given).run()

    return virtual_clock.run(whole()), sink.of("drop")


@pytest.mark.parametrize("environment", [OwnDeadline, Shortens])
def test_a_turn_that_failed_may_be_asked_for_again(environment, tmp_path):
    state, drops = run(tmp_path, environment=environment())
    assert state.step == 6 and not [drop for drop in drops if drop["reason"] == "failed"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"environment": TwoAtOnce()}, "environment: it asked for two turns of task 2 at once"),
        ({"environment": ChangesItsMind()}, "environment: it gave up on a turn of task 2 that had begun"),
        ({"environment": Awaits()}, "environment: a CancelledError came out of it"),
        ({"scorer": AwaitsScorer()}, "a CancelledError came out of it"),
    ],
    ids=["two at once", "another prompt", "cancelled elsewhere", "scorer"],
)
def test_its_group_alone_is_dropped(given, said, tmp_path):
    state, drops = run(tmp_path, **given)
    assert state.step == 6
    (drop,) = [drop for drop in drops if drop["reason"] == "failed"]
    assert drop["group"] == 2 and said in drop["detail"]


class Prompts(OneTurn):
    """Shows the task's number in a form of its own."""

    def __init__(self, form, tasks=None):
        super().__init__()
        self._form, self._tasks = form, tasks

    async def run(self, task, policy):
        is_own = self._tasks is None or task.id in self._tasks
        return one(await policy.sample((self._form if is_own else list)([int(task.id)]), self._sampling))


class Tokens(ScriptedEngine):
    """Keeps the prompts."""

    def __init__(self):
        super().__init__()
        self.prompts = {}

    async def generate(self, request, on_progress=None):
        self.prompts[request.id] = (request.prompt_ids.tolist(), str(request.prompt_ids.dtype))
        return await super().generate(request, on_progress)


@pytest.mark.parametrize("form", [list, tuple])
def test_a_list_of_token_ids_is_a_prompt_like_an_array(form, tmp_path):
    def prompts(environment, name):
        async def whole():
            engine = Tokens()
            await make_pipeline(tmp_path / name, make_plan(), environment=environment, engines=[engine]).run()
            return engine.prompts

        return virtual_clock.run(whole())

    assert prompts(Prompts(form), "form") == prompts(OneTurn(), "array")


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        (lambda ids: "What is 2+2?", r"'What is 2\+2\?'"),
        (lambda ids: [0.5, 1.0], r"\[0\.5, 1\.0\]"),
        (lambda ids: [ids, [1, 2]], r"\[\[2\], \[1, 2\]\]"),
        (lambda ids: np.array([ids]), r"array\(\[\[2\]\]\)"),
        (lambda ids: None, "None"),
    ],
    ids=["text", "fractions", "rows", "matrix", "nothing"],
)
def test_a_prompt_that_is_no_token_ids_is_told_what_is_expected(form, shown, tmp_path):
    _, drops = run(tmp_path, environment=Prompts(form, {"2"}))
    (drop,) = [drop for drop in drops if drop["reason"] == "failed"]
    said = (
        rf"^environment: it gave policy\.sample the prompt {shown}; give token ids, an array or list of ints"
    )
    assert drop["group"] == 2 and re.match(said, drop["detail"])
    assert "test_unruly_code.py" in drop["traceback"]


class Plain(OneTurn):
    def run(self, task, policy):
        return one()


class Raises(OneTurn):
    async def run(self, task, policy):
        raise KeyError("my bug")


class Late(OneTurn):
    async def run(self, task, policy):
        await asyncio.sleep(1e5)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (Raises, rf"environment: KeyError: 'my bug' \(test_unruly_code\.py:{line_of(Raises)}\)"),
        (
            Plain,
            r"environment: Plain\.run returned a tuple that cannot be awaited; write it as async def run",
        ),
        (Late, r"attempt \d/\d took longer than rollout\.attempt_s = 5 s"),
    ],
)
def test_attempts_that_keep_failing_end_the_run_by_name_and_with_a_remedy(environment, said, tmp_path):
    sink = MemorySink()

    async def whole():
        await make_pipeline(tmp_path, make_plan(attempt_s=5.0), environment=environment(), sink=sink).run()

    remedy = r"; mend the cause and resume the run, or raise reward\.error_budget$"
    with pytest.raises(RolloutError, match=rf"^4 of \d groups failed, .*; the last one: {said}.*{remedy}"):
        virtual_clock.run(whole())


def test_the_traceback_of_an_environment_is_told_once_and_stays_with_the_error(tmp_path):
    sink = MemorySink()

    async def whole():
        await make_pipeline(tmp_path, make_plan(), environment=Raises(), sink=sink).run()

    with pytest.raises(RolloutError) as ended:
        virtual_clock.run(whole())
    told = [drop["traceback"] for drop in sink.of("drop") if "traceback" in drop]
    assert len(told) == 1 and 'raise KeyError("my bug")' in told[0]
    assert isinstance(ended.value.__cause__.__cause__, KeyError)


class Swallows(OneTurn):
    """Makes the best of whatever goes wrong."""

    async def run(self, task, policy):
        turns = []
        for _ in range(4):
            try:
                turns.append(await policy.sample(prompt(task), self._sampling))
            except Exception:
                break
            await asyncio.sleep(0.05)
        return one(*turns)


class Wraps(OneTurn):
    async def run(self, task, policy):
        async with asyncio.TaskGroup() as group:
            running = group.create_task(super().run(task, policy))
        return running.result()


@pytest.mark.parametrize(("environment", "num_turns"), [(Swallows, 4), (Wraps, 1)])
def test_a_stop_is_no_end_of_an_attempt(environment, num_turns, tmp_path):
    sink = MemorySink()
    plan = make_plan(steps=50, groups_per_step=4, max_lag=2)

    async def stopped():
        pipeline = make_pipeline(tmp_path, plan, sink=sink, environment=environment())
        asyncio.get_running_loop().call_later(0.33, pipeline.request_stop)
        return await pipeline.run()

    state = virtual_clock.run(stopped())
    assert state.step < 50 and state.groups
    ended = [episode for live in state.groups.values() for episode in live.episodes.values()]
    assert all(len(episode.trajectories[0].turns) == num_turns for episode in ended)
    assert not [drop for drop in sink.of("drop") if drop["reason"] == "failed"]


def test_a_stall_is_noticed_when_it_has_lasted_so_long(tmp_path):
    class Never(OneTurn):
        async def run(self, task, policy):
            await asyncio.sleep(1e5)

    async def whole():
        plan = make_plan(attempt_s=1e6, stall_s=600, sync_s=150)
        with pytest.raises(DeadlineError, match="nothing moved for 600 s"):
            await make_pipeline(tmp_path, plan, environment=Never()).run()
        return asyncio.get_running_loop().time()

    assert virtual_clock.run(whole()) < 900


class LongTool(OneTurn):
    """Some attempts are at a tool for minutes."""

    def __init__(self, is_slow):
        super().__init__()
        self._is_slow = is_slow

    async def run(self, task, policy):
        returned = await super().run(task, policy)
        if self._is_slow(task, policy):
            await asyncio.sleep(500)
        return returned


def test_a_stale_group_at_a_tool_holds_nobody_up(tmp_path):
    sink = MemorySink()
    plan = make_plan(attempt_s=600, stall_s=600, sync_s=150, staleness="drop")

    async def whole():
        environment = LongTool(lambda task, policy: task.id == "2")
        state = await make_pipeline(tmp_path, plan, environment=environment, sink=sink).run()
        return state, asyncio.get_running_loop().time()

    state, seconds = virtual_clock.run(whole())
    assert state.step == 6 and seconds < 100
    assert [drop["reason"] for drop in sink.of("drop") if drop["group"] == 2] == ["stale"]


def test_a_run_that_ends_leaves_no_attempt_without_a_fate(tmp_path):
    plan = make_plan(attempt_s=600, stall_s=600, sync_s=150, max_lag=4, group_size=8, quorum=0.8, steps=3)

    async def whole():
        environment = LongTool(lambda task, policy: int(task.id) >= 4 and policy.attempt == 0)
        state = await make_pipeline(tmp_path, plan, environment=environment).run()
        return state, asyncio.get_running_loop().time()

    state, seconds = virtual_clock.run(whole())
    assert state.step == 3 and seconds < 100
    assert not state.groups and not state.ledger.attempts().get("generating")
