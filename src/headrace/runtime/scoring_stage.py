"""Scores, as a stage of their own between rollout and buffer.

    waits for                            unblocked by
    question: a place at its source      a question before it that ends, or is given up
    settle: every source's columns       answers, or the source's deadline

In: attempts as they end, then their group. Out: score columns in the journal, and a list of what the group has
to go without. A source is asked about each attempt, or each group, once: what the journal holds is never asked for
again. Its queue is bounded by the slots of admission, since every attempt has one question a source in it.
Nothing here is awaited by an engine or the trainer, and no group is held longer than its sources' deadlines.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from headrace.data.steps import PROCESS, is_whole
from headrace.errors import CheckpointError, DeadlineError, InvariantError, RoleError, ScoreError
from headrace.protocols import ScoreSource
from headrace.runtime.cancellation import no_stray_cancellation
from headrace.runtime.journal import Record
from headrace.runtime.scoring_meter import ScoringMeter
from headrace.runtime.state import LiveGroup
from headrace.types import RoleStatus, ScoreColumn

Missing = tuple[str, int, str]
"""(source, attempt, why): ``late``, ``dead``, ``invalid`` or ``failed``."""
_Questions = dict[tuple[int, ...], asyncio.Task[None]]


class ScoringStage:
    def __init__(
        self,
        sources: Sequence[ScoreSource],
        *,
        meter: ScoringMeter,
        record: Callable[[Record], None],
        warn: Callable[[str, BaseException], None],
    ) -> None:
        """``warn`` is told of the first score of each source that is missing for a reason, in words and as it was
        raised."""
        names = [source.name for source in sources]
        assert len(set(names)) == len(names), f"two score sources share a name: {names}"
        self._sources = tuple(sources)
        self._asked_early = tuple([source for source in sources if source.per_attempt])
        self._only = sources[0] if len(sources) == 1 and _needs_no_task(sources[0]) else None
        self._num_waiting = 0
        """Groups that wait for the only source."""
        self._record = record
        self._warn = warn
        self._places = {source.name: asyncio.Semaphore(source.concurrency) for source in sources}
        self._asked: dict[tuple[int, str], _Questions] = {}
        """By group and source, questions by the attempts they are about."""
        self._counts: Counter[str] = Counter()
        self.meter = meter

    def attempt_ended(self, live: LiveGroup, attempt: int) -> None:
        """Ask what can be asked now."""
        for source in self._asked_early:
            if not _is_known(source, live, attempt):
                self._ask(source, live, (attempt,))

    async def settle(self, live: LiveGroup, attempts: Sequence[int]) -> list[Missing]:
        """Returns when every source has spoken of these attempts of a group, which have ended, or has been given up;
        says what is missing. Raises the fault of a required source."""
        if self._only is not None:
            return await self._ask_only(self._only, live, attempts)
        for source in self._sources:
            unknown = attempts
            if source.name in live.columns:
                unknown = [a for a in attempts if not _is_known(source, live, a)]
            for asked in [(a,) for a in unknown] if source.per_attempt else [tuple(unknown)]:
                if asked:
                    self._ask(source, live, asked)
        asked_sources = [source for source in self._sources if (live.group, source.name) in self._asked]
        try:
            with self.meter.holding():
                waits = [self._answers(source, live.group, attempts) for source in asked_sources]
                return [missing for found in await _all(waits) for missing in found]
        finally:
            self._give_up(live.group, attempts)

    async def _ask_only(self, source: ScoreSource, live: LiveGroup, attempts: Sequence[int]) -> list[Missing]:
        """Nothing goes on beside this one question, and no deadline is kept here: it is simply awaited."""
        unknown = [a for a in attempts if not _is_known(source, live, a)]
        self._num_waiting += 1
        try:
            with self.meter.holding():
                if unknown:
                    await self._question(source, live, tuple(unknown))
        finally:
            self._num_waiting -= 1
        return []

    def forget(self, group: int) -> None:
        """Give up every question about a group that has ended."""
        for source in self._sources:
            for question in self._asked.pop((group, source.name), {}).values():
                question.cancel()

    def _give_up(self, group: int, attempts: Sequence[int]) -> None:
        """Only the questions about these attempts."""
        for source in self._sources:
            questions = self._asked.get((group, source.name), {})
            for about in self._about(source, group, attempts):
                questions.pop(about).cancel()
            if not questions:
                self._asked.pop((group, source.name), None)

    def _about(self, source: ScoreSource, group: int, attempts: Sequence[int]) -> _Questions:
        """The questions about these attempts and no others."""
        questions = self._asked.get((group, source.name), {})
        return {about: question for about, question in questions.items() if set(attempts).issuperset(about)}

    def status(self) -> RoleStatus:
        tasks = [question for questions in self._asked.values() for question in questions.values()]
        queued = self._num_waiting + sum(not task.done() for task in tasks)
        return self.meter.status({"queued": queued, **self._counts})

    def _ask(self, source: ScoreSource, live: LiveGroup, attempts: tuple[int, ...]) -> None:
        questions = self._asked.setdefault((live.group, source.name), {})
        if attempts in questions:
            return
        name = f"{source.name} of group {live.group}"
        questions[attempts] = asyncio.create_task(self._question(source, live, attempts), name=name)
        # Whoever settles the group sees the error; a group that ends before has no use for it.
        questions[attempts].add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _question(self, source: ScoreSource, live: LiveGroup, attempts: tuple[int, ...]) -> None:
        episodes = [live.episodes[attempt] for attempt in attempts]
        async with self._places[source.name]:
            with self.meter.asking(source.name), no_stray_cancellation(source.name):
                columns = await source.score(live.task, episodes)
        check_columns(source.name, live.group, attempts, columns)
        self._record({"kind": "scores", "columns": list(columns)})

    async def _answers(self, source: ScoreSource, group: int, attempts: Sequence[int]) -> list[Missing]:
        questions = self._about(source, group, attempts)
        if not questions:
            return []
        how = asyncio.FIRST_EXCEPTION if source.required else asyncio.ALL_COMPLETED
        done, late = await asyncio.wait(questions.values(), timeout=source.deadline_s, return_when=how)
        faults = {
            a: fault for a, q in questions.items() if q in done and (fault := q.exception()) is not None
        }
        if late and not (source.required and faults):
            text = (
                f"waited {source.deadline_s:g} s for {source.name} to score group {group}; give it more time"
            )
            faults |= {a: DeadlineError(text) for a, q in questions.items() if q in late}
        for fault in faults.values():
            if source.required or isinstance(fault, (InvariantError, CheckpointError)):
                raise fault
        return [(source.name, a, self._count(source, f)) for attempts, f in faults.items() for a in attempts]

    def _count(self, source: ScoreSource, fault: BaseException) -> str:
        why = reason_of(fault)
        name = f"{source.name}_{why}"
        self._counts[name] += 1
        if self._counts[name] == 1:
            text = f"{source.name}: a score is missing ({why}): {fault}; the group is trained without it"
            self._warn(text, fault)
        return why


async def _all(waits: Sequence[Coroutine[Any, Any, list[Missing]]]) -> list[list[Missing]]:
    """The answers of all; the first fault cancels the other waits."""
    if len(waits) == 1:
        return [await waits[0]]
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def check_columns(source: str, group: int, attempts: Sequence[int], columns: Sequence[ScoreColumn]) -> None:
    """Raise ScoreError unless there is one whole, finite column for each attempt, in order."""
    if len(columns) != len(attempts):
        raise ScoreError(
            f"{source} gave {len(columns)} columns for {len(attempts)} attempts of group {group}"
        )
    for attempt, column in zip(attempts, columns, strict=True):
        if (column.source, column.group, column.attempt) != (source, group, attempt):
            wrong = f"{column.source} of {column.group}/{column.attempt}"
            raise ScoreError(f"{source} was asked about {group}/{attempt} and answered as {wrong}")
        fault = _fault(column)
        if fault:
            raise ScoreError(f"{source} of attempt {group}/{attempt}: {fault}")


def _fault(column: ScoreColumn) -> str:
    """What is wrong with what it says; empty: nothing."""
    if not all(map(math.isfinite, [value for value in column.rewards.values() if value is not None])):
        return f"a reward is not finite ({dict(column.rewards)})"
    ends, scores = column.step_ends, column.step_scores
    if ends is not None and (scores is None or len(scores) != len(ends)):
        return f"{0 if scores is None else len(scores)} scores for {len(ends)} steps"
    num_given = 1 if ends is None else len(ends)
    if column.versions is not None and len(column.versions) != num_given:
        return f"{len(column.versions)} versions of it for {num_given} scores"
    for values in (*(() if scores is None else (scores,)), *(column.logprobs or ())):
        if not np.isfinite(values).all():
            return "a score is not finite"
    return ""


def _needs_no_task(source: ScoreSource) -> bool:
    """Whether a group has one question to it, whose end nobody but the source has to see to."""
    return source.required and not source.per_attempt and source.deadline_s is None


def _is_known(source: ScoreSource, live: LiveGroup, attempt: int) -> bool:
    column, episode = live.columns.get(source.name, {}).get(attempt), live.episodes[attempt]
    num_tokens = live.num_sampled(attempt) if source.name == PROCESS else episode.num_tokens
    return column is not None and is_whole(column, num_tokens)


def reason_of(fault: BaseException) -> str:
    """Under which a score is missing."""
    if isinstance(fault, (DeadlineError, TimeoutError)):
        return "late"
    if isinstance(fault, RoleError):
        return "dead"
    return "invalid" if isinstance(fault, ScoreError) else "failed"
