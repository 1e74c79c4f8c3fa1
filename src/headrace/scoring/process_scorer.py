"""A process-reward model or function as ``protocols.StepScorer``, in whatever process it runs.

    waits for                       unblocked by
    question: its scores            the pass that takes it
    worker: a question              ``score_steps``

In: questions about the steps of attempts, from one event loop. Out: their scores. Whatever waits when a pass ends goes
into the next one, computed on a thread so that the loop goes on answering. A question that fails fails alone. What a
function of the user's raises becomes a RewardError with its name: a fault of the question, not of this role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from headrace.data.faults import FirstFaults, in_words
from headrace.errors import HeadraceError, RewardError, ScoreError
from headrace.scoring.calls import Threads, declared_arguments
from headrace.timekeeping import TimeLedger
from headrace.types import RoleStatus, StepQuestion, StepScores

PROCESS_ACTIVITIES = ("loading", "working", "idle-no-work")
MOST_QUESTIONS = 64
"""In one pass."""

Answer = StepScores | Exception


class StepCore(Protocol):
    """What computes the scores; called from one thread at a time."""

    def score(self, questions: Sequence[StepQuestion]) -> list[Answer]:
        """For each question its scores, or why it has none."""
        ...

    def counters(self) -> Mapping[str, float]: ...


class StepFunction:
    """A function of the user's. It is called by keyword with what it declares of ``prompt`` (text), ``steps`` (texts),
    ``token_ids``, ``ends`` and the task's columns, and returns a number for every step. One that changes says so by an
    attribute ``version``, an integer that grows; its scores carry it."""

    def __init__(
        self, function: Callable[..., Any], *, name: str, decode: Callable[[np.ndarray], str]
    ) -> None:
        self._function = function
        self._name = name
        self._decode = decode
        self._required, self._accepted = declared_arguments(function, name)
        self._num_calls = 0

    def score(self, questions: Sequence[StepQuestion]) -> list[Answer]:
        answers: list[Answer] = []
        for question in questions:
            try:
                answers.append(self._call(question))
            except Exception as error:
                answers.append(error)
        return answers

    def _call(self, question: StepQuestion) -> StepScores:
        self._num_calls += 1
        # Read before the call: a judge that learns from what it is asked has not yet.
        version = int(getattr(self._function, "version", 0))
        token_ids, task = question.token_ids, question.task
        borders = [question.num_prompt, *question.ends.tolist()]
        arguments = {
            **task.columns,
            "prompt": self._decode(token_ids[: question.num_prompt]),
            "steps": [self._decode(token_ids[a:b]) for a, b in pairwise(borders)],
            "token_ids": token_ids.tolist(),
            "ends": question.ends.tolist(),
        }
        missing = sorted(self._required - arguments.keys())
        if missing:
            raise RewardError(
                f"scoring.process: {self._name} asks for {missing[0]!r}, which task {task.id} has not"
            )
        chosen = {k: v for k, v in arguments.items() if self._accepted is None or k in self._accepted}
        scores = np.asarray(self._function(**chosen), dtype=np.float32).reshape(-1)
        num_steps = len(question.ends)
        if len(scores) != num_steps:
            raise ScoreError(
                f"scoring.process: {self._name} returned {len(scores)} scores for the {num_steps} steps of attempt "
                f"{question.attempt} so far; return one for each, from the first step on"
            )
        return StepScores(scores=scores[question.num_known :], version=version)

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
        log: Callable[[str], None] | None = None,
    ) -> None:
        """``threaded`` False computes on the loop itself, for runs that must repeat bit for bit. ``log`` is told the
        traceback of the first fault of each kind; None: the error that is raised has it."""
        self.name = name
        self._core = core
        self._threaded = threaded
        self._ledger = ledger or TimeLedger(PROCESS_ACTIVITIES)
        self._ledger.switch("idle-no-work")
        self._waiting: list[tuple[StepQuestion, asyncio.Future[StepScores]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._threads = Threads()
        self._log = log
        self._faults = FirstFaults()
        self._num_scores = 0
        self._num_passes = 0

    async def score_steps(self, question: StepQuestion) -> StepScores:
        # Nothing waits for ever here: whoever asks has a deadline, and what is given up is not computed.
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name=f"{self.name} passes")
        try:
            return await answer
        finally:
            # A pass may never end, and what was given up meanwhile must not pile up behind it.
            self._waiting = [pair for pair in self._waiting if pair[1] is not answer]

    async def _work(self) -> None:
        try:
            # What arrives in the same turn of the loop goes into the first pass too.
            await asyncio.sleep(0)
            while self._waiting:
                wanted = [pair for pair in self._waiting if not pair[1].done()]
                taken, self._waiting = wanted[:MOST_QUESTIONS], wanted[MOST_QUESTIONS:]
                if taken:
                    await self._answer(taken)
        finally:
            self._worker = None

    async def _answer(self, taken: Sequence[tuple[StepQuestion, asyncio.Future[StepScores]]]) -> None:
        questions = [question for question, _ in taken]
        with self._ledger.activity("working"):
            try:
                answers = await self._compute(questions)
            except Exception as error:
                answers = [error] * len(taken)
        self._num_passes += 1
        for (question, future), answer in zip(taken, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(self._named(answer, question))
            else:
                self._num_scores += len(answer.scores)
                future.set_result(answer)

    async def _compute(self, questions: Sequence[StepQuestion]) -> list[Answer]:
        if self._threaded:
            # A thread that never comes back must not keep the process from ending.
            return await self._threads.run(lambda: self._core.score(questions))
        return self._core.score(questions)

    def _named(self, error: Exception, question: StepQuestion) -> Exception:
        if isinstance(error, HeadraceError):
            return error
        traceback = self._faults.traceback(error)
        if traceback and self._log is not None:
            self._log(traceback)
        named = RewardError(f"{self.name} failed on attempt {question.attempt}: {in_words(error)}")
        named.__cause__ = error
        return named

    async def status(self) -> RoleStatus:
        return RoleStatus(
            role=self.name,
            version=0,
            progress=self._num_scores,
            seconds=self._ledger.seconds(),
            counters={**self._core.counters(), "passes": self._num_passes},
        )

    async def close(self) -> None:
        """A pass under way ends by itself; nobody waits for it."""
        for _, answer in self._waiting:
            answer.cancel()
        self._threads.close()
