"""Reward functions in TRL's signature, scored one group at a time.

In: a task and its finished episodes. Out: for each episode a value by reward name, None where a
function says it does not apply. A function is called by keyword, ``fn(prompts=, completions=,
completion_ids=, **columns)``, every argument a list with one entry per episode, and gets only the
parameters it declares unless it takes ``**kwargs``. Text prompts come with completions as text, chat
prompts with ``[{"role": "assistant", "content": ...}]``.

Invariant: a function that raises, overruns or answers nonsense is tried again ``retries`` times and
then raises ``RewardError``; it never yields a made-up value. Plain functions run on threads of their
own. Coroutine functions run on the event loop and must not block it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from headrace.data.faults import FirstFaults
from headrace.data.returns import weighted_return
from headrace.errors import ConfigError, RewardError
from headrace.scoring.calls import CallFailed, Threads, call, checked_values, declared_arguments, is_async
from headrace.types import Episode, Task

RewardFunction = Callable[..., Any]


class FunctionScorer:
    """Scores groups with one or more reward functions, all of a group's at the same time."""

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        *,
        weights: Mapping[str, float] | None = None,
        timeout_s: float = 60.0,
        retries: int = 1,
        workers: int = 4,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """``log`` is told the traceback of the first fault of each kind; None: the error that is raised has it."""
        if not functions:
            raise ConfigError("no reward function was given: name at least one")
        self._functions = dict(functions)
        self._weights = _checked_weights(weights, self._functions)
        self._declared = {name: declared_arguments(function, name) for name, function in functions.items()}
        self._on_loop = frozenset(name for name, function in functions.items() if is_async(function))
        self._timeout_s = timeout_s
        self._retries = retries
        self._log = log
        self._faults = FirstFaults()
        # Waiting here is bounded: whoever holds a place gives it up after timeout_s.
        self._places = asyncio.Semaphore(workers)
        self._threads = Threads()

    async def score(self, task: Task, episodes: Sequence[Episode]) -> list[Mapping[str, float | None]]:
        """Rewards by name for each episode; a RewardError names the function, the task and the fault."""
        arguments = group_arguments(task, episodes)
        calls = [self._values(name, task, arguments, len(episodes)) for name in self._functions]
        columns = [await calls[0]] if len(calls) == 1 else await _all(calls)
        return [dict(zip(self._functions, row, strict=True)) for row in zip(*columns, strict=True)]

    def total(self, rewards: Mapping[str, float | None]) -> float:
        """The weighted sum of one episode's rewards."""
        return total(rewards, self._weights)

    async def close(self) -> None:
        """Threads still in a call are daemons, and their answers are ignored."""
        self._threads.close()

    async def _values(
        self, name: str, task: Task, arguments: Mapping[str, Any], num_episodes: int
    ) -> list[float | None]:
        chosen = self._chosen(name, task, arguments)
        fault: CallFailed | None = None
        for _ in range(self._retries + 1):
            try:
                answer = await self._call(name, chosen)
                return checked_values(answer, num_episodes)
            except CallFailed as failed:
                fault = failed
        assert fault is not None
        self._tell_log(fault.__cause__)
        tries = f"{self._retries + 1} tries" if self._retries else "1 try"
        raise RewardError(
            f"reward {name!r} failed on task {task.id} after {tries}: it {fault}"
        ) from fault.__cause__

    def _tell_log(self, fault: BaseException | None) -> None:
        text = "" if fault is None else self._faults.traceback(fault)
        if text and self._log is not None:
            self._log(text)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        function = self._functions[name]
        if name in self._on_loop:
            return await call(function, arguments, timeout_s=self._timeout_s, threads=None)
        async with self._places:
            return await call(function, arguments, timeout_s=self._timeout_s, threads=self._threads)

    def _chosen(self, name: str, task: Task, arguments: Mapping[str, Any]) -> dict[str, Any]:
        required, accepted = self._declared[name]
        missing = sorted(required - arguments.keys())
        if missing:
            present = ", ".join(task.columns) or "none"
            raise RewardError(
                f"reward {name!r} asks for {missing[0]!r}, which task {task.id} has not (its columns: "
                f"{present}): add the column, or give the parameter a default"
            )
        return {key: value for key, value in arguments.items() if accepted is None or key in accepted}


async def _all(calls: Sequence[Coroutine[Any, Any, list[float | None]]]) -> list[list[float | None]]:
    """The answers; when a call fails, the others are awaited before its error is raised."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    columns = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        columns.append(answer)
    return columns


def group_arguments(task: Task, episodes: Sequence[Episode]) -> dict[str, Any]:
    """What reward functions may ask for: the group's first trajectories and the task's columns, as lists."""
    trajectories = [episode.trajectories[0] for episode in episodes]
    prompts: list[Any]
    completions: list[Any]
    if isinstance(task.prompt, str):
        prompts = [task.prompt for _ in episodes]
        completions = [trajectory.text for trajectory in trajectories]
    else:
        prompts = [[dict(message) for message in task.prompt] for _ in episodes]
        completions = [[{"role": "assistant", "content": trajectory.text}] for trajectory in trajectories]
    return {
        **{column: [value] * len(episodes) for column, value in task.columns.items()},
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [trajectory.turns[-1].completion.token_ids.tolist() for trajectory in trajectories],
    }


def total(rewards: Mapping[str, float | None], weights: Mapping[str, float] | None = None) -> float:
    """Weighted sum of the rewards that apply (weight 1 where none is given); RewardError when none does."""
    return weighted_return(rewards, [(weights or {}).get(name, 1.0) for name in rewards])


def _checked_weights(
    weights: Mapping[str, float] | None, functions: Mapping[str, RewardFunction]
) -> dict[str, float]:
    for name in weights or {}:
        if name not in functions:
            raise ConfigError(f"reward weight {name!r} names no reward (they are: {', '.join(functions)})")
    return dict(weights or {})
