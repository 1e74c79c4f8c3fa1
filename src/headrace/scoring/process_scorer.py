"""A process-reward model or function as ``protocols.StepScorer``, in whatever process it runs.

In: questions about the steps of attempts, from one event loop. Out: their scores, one question after the other,
computed on a thread so that the loop goes on answering. What a function of the user's raises becomes a RewardError
with its name: a fault of the question, not of this role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from headrace.errors import HeadraceError, RewardError
from headrace.scoring.calls import declared_arguments
from headrace.timekeeping import TimeLedger
from headrace.types import RoleStatus, Task

PROCESS_ACTIVITIES = ("loading", "working", "idle-no-work")


class StepCore(Protocol):
    """What computes the scores; called from one thread at a time."""

    def score(
        self,
        attempt: str,
        task: Task,
        token_ids: np.ndarray,
        ends: np.ndarray,
        *,
        num_prompt: int,
        num_known: int,
        last: bool,
    ) -> np.ndarray: ...

    def counters(self) -> Mapping[str, float]: ...


class StepFunction:
    """A function of the user's. It is called by keyword with what it declares of ``prompt`` (text), ``steps`` (texts),
    ``token_ids``, ``ends`` and the task's columns, and returns a number for every step."""

    def __init__(
        self, function: Callable[..., Any], *, name: str, decode: Callable[[np.ndarray], str]
    ) -> None:
        self._function = function
        self._name = name
        self._decode = decode
        self._required, self._accepted = declared_arguments(function, name)
        self._num_calls = 0

    def score(
        self,
        attempt: str,
        task: Task,
        token_ids: np.ndarray,
        ends: np.ndarray,
        *,
        num_prompt: int,
        num_known: int,
        last: bool,
    ) -> np.ndarray:
        self._num_calls += 1
        borders = [num_prompt, *ends.tolist()]
        arguments = {
            **task.columns,
            "prompt": self._decode(token_ids[:num_prompt]),
            "steps": [self._decode(token_ids[a:b]) for a, b in pairwise(borders)],
            "token_ids": token_ids.tolist(),
            "ends": ends.tolist(),
        }
        missing = sorted(self._required - arguments.keys())
        if missing:
            raise RewardError(
                f"scoring.process: {self._name} asks for {missing[0]!r}, which task {task.id} has not"
            )
        chosen = {k: v for k, v in arguments.items() if self._accepted is None or k in self._accepted}
        # An answer of another length is sent on as it is: whoever asked counts it as invalid.
        return np.asarray(self._function(**chosen), dtype=np.float32).reshape(-1)[num_known:]

    def counters(self) -> Mapping[str, float]:
        return {"calls": self._num_calls}


class ProcessScorer:
    def __init__(
        self,
        core: StepCore,
        *,
        name: str = "process",
        threaded: bool = True,
        ledger: TimeLedger | None = None,
    ) -> None:
        """``threaded`` False computes on the loop itself, for runs that must repeat bit for bit."""
        self.name = name
        self._core = core
        self._threaded = threaded
        self._ledger = ledger or TimeLedger(PROCESS_ACTIVITIES)
        self._ledger.switch("idle-no-work")
        self._working = asyncio.Lock()
        self._num_scores = 0

    async def score_steps(
        self,
        attempt: str,
        task: Task,
        token_ids: np.ndarray,
        ends: np.ndarray,
        *,
        num_prompt: int,
        num_known: int,
        last: bool,
    ) -> np.ndarray:
        # Whoever asks has a deadline, and a question that is given up while it waits is never computed.
        async with self._working:
            with self._ledger.activity("working"):
                scores = await self._compute(
                    attempt, task, token_ids, ends, num_prompt=num_prompt, num_known=num_known, last=last
                )
        self._num_scores += len(scores)
        return scores

    async def _compute(self, attempt: str, task: Task, *arrays: np.ndarray, **rest: Any) -> np.ndarray:
        try:
            if self._threaded:
                return await asyncio.to_thread(self._core.score, attempt, task, *arrays, **rest)
            return self._core.score(attempt, task, *arrays, **rest)
        except HeadraceError:
            raise
        except Exception as error:
            raise RewardError(
                f"{self.name} failed on attempt {attempt}: {type(error).__name__}: {error}"
            ) from error

    async def status(self) -> RoleStatus:
        return RoleStatus(
            role=self.name,
            version=0,
            progress=self._num_scores,
            seconds=self._ledger.seconds(),
            counters=dict(self._core.counters()),
        )

    async def close(self) -> None:
        """A computation under way ends by itself; nobody waits for it."""
