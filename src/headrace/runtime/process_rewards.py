"""Process rewards: the steps of an attempt are judged while it is still being sampled.

    waits for                            unblocked by
    watch: a step that ends              the engine's progress
    question: a place at the scorer      a question before it

In: attempts as they grow (``StepWatch``) and as they end (``ProcessRewards.score``, a source of the scoring stage).
Out: score columns in the journal, a few steps at a time, and, where the plan says so, an end to attempts that look
hopeless. An attempt has one question under way at most, and the next one covers all steps that ended meanwhile: a
slow scorer is asked less often, and what waits for it is bounded by the attempts there are. A question that fails
while the attempt goes on is counted as such and put again when it has ended; a score is missing if that fails too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from headrace.data.steps import PROCESS, continued, split
from headrace.protocols import StepScorer
from headrace.runtime.journal import Record
from headrace.runtime.plan import ProcessPlan
from headrace.runtime.scoring_meter import ScoringMeter
from headrace.runtime.scoring_stage import check_columns, reason_of
from headrace.runtime.state import LiveGroup
from headrace.types import Completion, Episode, ScoreColumn, StepQuestion, StepScores, Task, Turn

PLACES = 64
"""Questions at the scorer at a time; it answers many in one pass."""
HOPELESS_STEPS = 2
"""Steps in a row below ``abort_below`` after which an attempt is given up."""


class ProcessRewards:
    name = PROCESS
    required = False
    per_attempt = True
    concurrency = PLACES

    def __init__(
        self,
        scorer: StepScorer,
        plan: ProcessPlan,
        *,
        live: Callable[[int], LiveGroup],
        meter: ScoringMeter,
        record: Callable[[Record], None],
    ) -> None:
        self.plan = plan
        self.deadline_s: float | None = plan.deadline_s
        self._scorer = scorer
        self._live = live
        self._meter = meter
        self._record = record
        self._places = asyncio.Semaphore(PLACES)
        self._watches: dict[tuple[int, int], StepWatch] = {}

    def watch(self, live: LiveGroup, attempt: int) -> StepWatch:
        """The eye on an attempt that is about to be sampled."""
        watch = self._watches[(live.group, attempt)] = StepWatch(self, live, attempt)
        return watch

    def forget(self, group: int) -> None:
        """The group has ended; nothing more is said of it."""
        for key in [key for key in self._watches if key[0] == group]:
            self._watches.pop(key).close()

    async def score(self, task: Task, episodes: Sequence[Episode]) -> list[ScoreColumn]:
        """What was not said of the episodes while they were sampled."""
        return [await self._rest(episode) for episode in episodes]

    async def _rest(self, episode: Episode) -> ScoreColumn:
        live, attempt = self._live(episode.group), episode.attempt
        watch = self._watches.pop((live.group, attempt), None)
        if watch is not None:
            await watch.settled()
        column = self._column(live, attempt, np.zeros(0, np.int32), StepScores(scores=np.zeros(0)))
        untold = self.untold(live, attempt)
        for offset, turn in untold:
            last = turn is untold[-1][1]
            more = await self.ask(
                live, attempt, offset, turn.prompt_ids, turn.completion, finished=True, last=last
            )
            column = continued(column, more)
        return column

    def untold(self, live: LiveGroup, attempt: int) -> list[tuple[int, Turn]]:
        """Finished turns with steps that are not scored, and how many tokens were sampled before each. Steps are
        told as turns are sampled: which trajectory a turn belongs to is known only when the attempt has ended."""
        told, found, offset = self.num_told(live, attempt), [], 0
        for turn in live.turns.get(attempt, ()):
            if offset + turn.completion.num_tokens > told:
                found.append((offset, turn))
            offset += turn.completion.num_tokens
        return found

    def num_told(self, live: LiveGroup, attempt: int) -> int:
        """Sampled tokens whose steps are scored."""
        column = live.columns.get(self.name, {}).get(attempt)
        ends = None if column is None else column.step_ends
        return 0 if ends is None or not len(ends) else int(ends[-1])

    async def ask_beside(
        self,
        live: LiveGroup,
        attempt: int,
        offset: int,
        prompt_ids: np.ndarray,
        completion: Completion,
        *,
        finished: bool,
    ) -> ScoreColumn:
        """Ask about steps that have ended while the attempt goes on."""
        async with asyncio.timeout(self.plan.deadline_s), self._places:
            with self._meter.asking(self.name):
                return await self.ask(live, attempt, offset, prompt_ids, completion, finished=finished)

    def tell(self, column: ScoreColumn) -> None:
        self._record({"kind": "scores", "columns": [column]})

    def tell_failed(self, fault: Exception) -> None:
        """Of a question that will be put again."""
        self._record({"kind": "again", "source": self.name, "why": reason_of(fault)})

    async def ask(
        self,
        live: LiveGroup,
        attempt: int,
        offset: int,
        prompt_ids: np.ndarray,
        completion: Completion,
        *,
        finished: bool,
        last: bool = False,
    ) -> ScoreColumn:
        """The scores of a turn's steps that are not told yet; ``offset`` tokens were sampled in turns before it."""
        ends = split(completion.token_ids, completion.logprobs, self.plan.rule, finished=finished)
        num_known = int(np.searchsorted(ends, self.num_told(live, attempt) - offset, side="right"))
        question = StepQuestion(
            attempt=f"{live.group}/{attempt}",
            task=live.task,
            token_ids=np.concatenate([prompt_ids, completion.token_ids]).astype(np.int32),
            num_prompt=len(prompt_ids),
            ends=(len(prompt_ids) + ends).astype(np.int32),
            num_known=num_known,
            last=last,
        )
        said = await self._scorer.score_steps(question)
        column = self._column(live, attempt, offset + ends[num_known:], said)
        check_columns(self.name, live.group, (attempt,), (column,))
        return column

    def _column(self, live: LiveGroup, attempt: int, ends: np.ndarray, said: StepScores) -> ScoreColumn:
        return ScoreColumn(
            source=self.name,
            group=live.group,
            attempt=attempt,
            step_ends=ends.astype(np.int32),
            step_scores=np.asarray(said.scores, dtype=np.float32),
            versions=np.full(len(ends), said.version, dtype=np.int32) if said.version else None,
        )

    def is_hopeless(self, live: LiveGroup, attempt: int) -> bool:
        column = live.columns.get(self.name, {}).get(attempt)
        if column is None or column.step_scores is None or self.plan.abort_below is None:
            return False
        lately = column.step_scores[-HOPELESS_STEPS:]
        return len(lately) == HOPELESS_STEPS and bool((lately < self.plan.abort_below).all())


class StepWatch:
    """One attempt as it is sampled."""

    def __init__(self, rewards: ProcessRewards, live: LiveGroup, attempt: int) -> None:
        self._rewards = rewards
        self._live = live
        self._attempt = attempt
        self._latest: tuple[int, np.ndarray, Completion] | None = None
        """A turn that grew: tokens sampled before it, its prompt, and its own so far."""
        self._asking: asyncio.Task[None] | None = None
        self._failed = False
        self.gave_up = rewards.is_hopeless(live, attempt)
        """The attempt is not worth another token. What it has is its whole answer: it is never resumed."""
        self.abort: Callable[[], Awaitable[None]] | None = None
        """Ends the request under way; None: there is none."""

    def grew(self, prompt_ids: np.ndarray, so_far: Completion) -> None:
        """The running turn has sampled ``so_far``; called between two pieces of the engine's progress."""
        if self._failed or self.gave_up:
            return
        offset = self._live.num_sampled(self._attempt)
        ends = split(so_far.token_ids, so_far.logprobs, self._rewards.plan.rule, finished=False)
        if not len(ends) or offset + int(ends[-1]) <= self._rewards.num_told(self._live, self._attempt):
            return
        # Counted now: the turn may be over, and be one of those before, when the question is put.
        self._latest = (offset, prompt_ids, so_far)
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name=f"steps {self._live.group}/{self._attempt}")

    async def settled(self) -> None:
        """Until the question under way has ended; none follows."""
        self._failed = True
        if self._asking is not None:
            await self._asking

    def close(self) -> None:
        self._failed = True
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        try:
            while self._latest is not None and not self._failed:
                # What a turn that has ended left open comes first: scores are told in order.
                if not await self._told_finished_turns():
                    return
                (offset, prompt_ids, so_far), self._latest = self._latest, None
                if offset < self._live.num_sampled(self._attempt):
                    # The turn has ended meanwhile, and is told as a whole.
                    continue
                if not await self._told(offset, prompt_ids, so_far, finished=False):
                    return
                if self._rewards.is_hopeless(self._live, self._attempt):
                    return await self._give_up()
        finally:
            self._asking = None

    async def _told_finished_turns(self) -> bool:
        # More may end while one is asked about.
        while not self._failed and (untold := self._rewards.untold(self._live, self._attempt)):
            offset, turn = untold[0]
            await self._told(offset, turn.prompt_ids, turn.completion, finished=True)
        return not self._failed

    async def _told(self, offset: int, prompt_ids: np.ndarray, so_far: Completion, *, finished: bool) -> bool:
        """False: it failed, and is put again, with a deadline, when the attempt has ended."""
        try:
            column = await self._rewards.ask_beside(
                self._live, self._attempt, offset, prompt_ids, so_far, finished=finished
            )
        except Exception as fault:
            self._failed = True
            self._rewards.tell_failed(fault)
            return False
        self._rewards.tell(column)
        return True

    async def _give_up(self) -> None:
        if self._attempt in self._live.episodes:
            return
        self.gave_up = True
        if self.abort is not None:
            await self.abort()
