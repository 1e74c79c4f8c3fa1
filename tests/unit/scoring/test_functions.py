from __future__ import annotations

import asyncio
import functools
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigError, RewardError
from headrace.scoring.functions import FunctionScorer, total
from headrace.types import NO_KV, Completion, Episode, Sampling, Task, Trajectory, Turn

TEXT_TASK = Task(id="list/3", prompt="1+1=", columns={"answer": "2", "hint": ["h"]})
CHAT_TASK = Task(id="chat/0", prompt=({"role": "user", "content": "hi"},), columns={"answer": "2"})


def episode(task: Task, attempt: int, text: str) -> Episode:
    ids = np.arange(len(text), dtype=np.int32)
    completion = Completion(
        token_ids=ids,
        logprobs=np.zeros(len(text), dtype=np.float32),
        versions=np.zeros(len(text), dtype=np.int32),
        finish_reason="stop",
        kv_versions=NO_KV,
    )
    turn = Turn(
        prompt_ids=ids,
        completion=completion,
        sampling=Sampling(max_tokens=4),
        seed=attempt,
        engine="engine-0",
    )
    return Episode(group=0, attempt=attempt, task=task, trajectories=(Trajectory(turns=(turn,), text=text),))


def score(
    scorer: FunctionScorer, task: Task = TEXT_TASK, texts: Sequence[str] = ("2", "3")
) -> list[dict[str, Any]]:
    episodes = [episode(task, i, text) for i, text in enumerate(texts)]
    return [dict(rewards) for rewards in asyncio.run(scorer.score(task, episodes))]


def failure(function: Callable[..., Any], **options: Any) -> str:
    with pytest.raises(RewardError) as caught:
        score(FunctionScorer({"exact": function}, **options))
    return str(caught.value)


def test_a_group_is_passed_by_keyword_as_lists() -> None:
    seen: dict[str, Any] = {}

    def record(**arguments: Any) -> list[float]:
        seen.update(arguments)
        return [0.0, 1.0]

    assert score(FunctionScorer({"record": record})) == [{"record": 0.0}, {"record": 1.0}]
    assert seen == {
        "prompts": ["1+1=", "1+1="],
        "completions": ["2", "3"],
        "completion_ids": [[0], [0]],
        "answer": ["2", "2"],
        "hint": [["h"], ["h"]],
    }


def test_chat_completions_are_message_lists() -> None:
    seen: dict[str, Any] = {}

    def record(prompts: list, completions: list) -> list[float]:
        seen.update(prompts=prompts, completions=completions)
        return [0.0, 0.0]

    score(FunctionScorer({"record": record}), CHAT_TASK)
    assert seen["prompts"] == [[{"role": "user", "content": "hi"}]] * 2
    assert seen["completions"] == [[{"role": "assistant", "content": t}] for t in ("2", "3")]


def test_only_declared_parameters_are_passed() -> None:
    def exact(completions: list[str], answer: list[str], *, bonus: float = 0.5) -> list[float]:
        return [float(c == a) + bonus for c, a in zip(completions, answer, strict=True)]

    assert score(FunctionScorer({"exact": exact})) == [{"exact": 1.5}, {"exact": 0.5}]


def test_missing_column_is_named_and_not_retried() -> None:
    calls = []

    def needs(completions: list[str], solution: list[str]) -> list[float]:
        calls.append(1)
        return [0.0, 0.0]

    said = failure(needs, retries=3)
    assert "'solution'" in said and "list/3" in said and "answer, hint" in said
    assert calls == []


async def async_reward(completions: list[str]) -> list[float | None]:
    await asyncio.sleep(0)
    return [1.0, None]


class AsyncObject:
    async def __call__(self, completions: list[str]) -> list[float]:
        return [1.0, 0.0]


def returns_a_coroutine(completions: list[str]) -> Any:
    return async_reward(completions)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (async_reward, [1.0, None]),
        (AsyncObject(), [1.0, 0.0]),
        (returns_a_coroutine, [1.0, None]),
        (functools.partial(async_reward), [1.0, None]),
        (lambda completions: (True, np.float32(0.5)), [1.0, 0.5]),
        (lambda completions: np.array([1, 2]), [1.0, 2.0]),
        (lambda completions: (float(c) for c in completions), [2.0, 3.0]),
        (lambda completions: [None, None], [None, None]),
    ],
)
def test_kinds_of_functions_and_answers(function: Callable[..., Any], expected: list[float | None]) -> None:
    rewards = score(FunctionScorer({"r": function}))
    assert [r["r"] for r in rewards] == expected
    assert all(type(r["r"]) in (float, type(None)) for r in rewards)


def test_several_functions_are_reported_by_name_in_order() -> None:
    functions = {"b": lambda completions: [1, 2], "a": async_reward}
    assert [list(r.items()) for r in score(FunctionScorer(functions))] == [
        [("b", 1.0), ("a", 1.0)],
        [("b", 2.0), ("a", None)],
    ]


def raises(completions: list[str]) -> list[float]:
    raise ValueError("boom")


async def raises_async(completions: list[str]) -> list[float]:
    raise TimeoutError("their own")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises, ["ValueError: boom"]),
        (raises_async, ["TimeoutError: their own"]),
        (lambda completions: sys.exit(3), ["SystemExit"]),
        (lambda completions: next(iter(())), ["StopIteration"]),
        (lambda completions: [1.0], ["1 values for 2 completions"]),
        (lambda completions: 1.0, ["a float", "list"]),
        (lambda completions: None, ["NoneType"]),
        (lambda completions: "12", ["a str"]),
        (lambda completions: {"a": 1, "b": 2}, ["a dict"]),
        (lambda completions: [1.0, "x"], ["a str for completion 1"]),
        (lambda completions: [1.0, math.nan], ["nan for completion 1"]),
        (lambda completions: [-math.inf, 0.0], ["-inf for completion 0"]),
        (lambda completions: np.zeros((2, 2)), ["completion 0"]),
    ],
)
def test_bad_answers_say_what_was_wrong(function: Callable[..., Any], words: list[str]) -> None:
    said = failure(function, retries=0)
    for word in ["'exact'", "list/3", "1 try", *words]:
        assert word in said


@pytest.mark.parametrize("function", [raises, raises_async])
def test_a_function_that_raises_is_told_with_its_line_and_logged_once(function: Callable[..., Any]) -> None:
    logged: list[str] = []
    scorer = FunctionScorer({"exact": function}, log=logged.append)
    line = function.__code__.co_firstlineno + 1
    for _ in range(2):
        with pytest.raises(RewardError, match=rf"\(test_functions\.py:{line}\)$") as caught:
            score(scorer)
        assert isinstance(caught.value.__cause__, (ValueError, TimeoutError))
    (text,) = logged
    assert text.startswith("Traceback") and f"in {function.__name__}\n" in text


def test_a_failing_call_is_retried_then_given_up() -> None:
    calls = itertools.count(1)

    def flaky(completions: list[str]) -> list[float]:
        if next(calls) < 3:
            raise OSError("try again")
        return [1.0, 1.0]

    assert "after 2 tries" in failure(flaky, retries=1)
    calls = itertools.count(1)
    assert score(FunctionScorer({"exact": flaky}, retries=2)) == [{"exact": 1.0}] * 2


def test_the_first_failing_function_is_reported_and_the_others_are_awaited() -> None:
    with pytest.raises(RewardError, match="'bad'"):
        score(FunctionScorer({"good": async_reward, "bad": raises, "worse": raises_async}, retries=0))


def test_a_blocked_function_neither_stalls_the_loop_nor_starves_the_workers() -> None:
    release = threading.Event()
    blocked = threading.Event()

    def blocks(completions: list[str]) -> list[float]:
        blocked.set()
        release.wait(60)
        return [0.0, 0.0]

    async def run() -> tuple[str, int, list[Any]]:
        one_worker = FunctionScorer({"stuck": blocks}, timeout_s=0.05, retries=2, workers=1)
        waiting = asyncio.ensure_future(one_worker.score(TEXT_TASK, episodes))
        ticks = 0
        while not waiting.done():
            await asyncio.sleep(0.001)
            ticks += 1
        return (
            str(waiting.exception()),
            ticks,
            await FunctionScorer({"ok": async_reward}).score(TEXT_TASK, episodes),
        )

    episodes = [episode(TEXT_TASK, i, text) for i, text in enumerate("23")]
    said, ticks, after = asyncio.run(run())
    release.set()
    assert blocked.is_set()
    assert "'stuck' failed on task list/3 after 3 tries: it gave no answer within 0.05 s" in said
    assert ticks > 3
    assert after == [{"ok": 1.0}, {"ok": None}]


def test_an_async_function_is_cut_off_at_the_deadline() -> None:
    async def sleeps(completions: list[str]) -> list[float]:
        await asyncio.sleep(3600)
        return [0.0, 0.0]

    assert "no answer within 0.01 s" in failure(sleeps, timeout_s=0.01, retries=0)


def test_no_more_calls_at_a_time_than_workers() -> None:
    lock = threading.Lock()
    running, most = 0, 0

    def counts(completions: list[str]) -> list[float]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1
        return [0.0, 0.0]

    async def run() -> None:
        scorer = FunctionScorer({"counts": counts}, workers=2)
        episodes = [episode(TEXT_TASK, i, text) for i, text in enumerate("23")]
        await asyncio.gather(*(scorer.score(TEXT_TASK, episodes) for _ in range(12)))

    asyncio.run(run())
    assert 1 <= most <= 2


def test_user_code_runs_on_daemon_threads() -> None:
    seen = []

    def where(completions: list[str]) -> list[float]:
        seen.append(
            (threading.current_thread().daemon, threading.current_thread() is threading.main_thread())
        )
        return [0.0, 0.0]

    score(FunctionScorer({"where": where}))
    assert seen == [(True, False)]


def test_positional_only_and_empty_are_refused_at_once() -> None:
    def positional(completions: list[str], /) -> list[float]:
        return [0.0]

    with pytest.raises(RewardError, match="'completions' by position only"):
        FunctionScorer({"exact": positional})
    with pytest.raises(ConfigError, match="no reward function"):
        FunctionScorer({})
    with pytest.raises(ConfigError, match=r"weight 'exat' names no reward \(they are: exact\)"):
        FunctionScorer({"exact": raises}, weights={"exat": 1.0})


def test_total_is_the_weighted_sum_of_what_applies() -> None:
    scorer = FunctionScorer({"a": raises, "b": raises}, weights={"b": 0.5})
    assert scorer.total({"a": 1.0, "b": 4.0}) == 3.0
    assert scorer.total({"a": None, "b": 4.0}) == 2.0
    assert total({"a": 1.0, "b": -1.0}) == 0.0
    with pytest.raises(RewardError, match="a, b all returned None"):
        total({"a": None, "b": None})
