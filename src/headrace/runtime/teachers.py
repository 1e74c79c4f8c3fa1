"""Models that the policy is pulled towards: engines of their own, asked once for each group.

In: the finished episodes of a group. Out: what the task's teacher thinks of every token its samples will have, at the
temperatures they were sampled with and, where only the sampled tokens are scored, over the same kept sets. Which
teacher that is, the task's column ``teacher`` says: a name, absent for the first one, ``none`` for a task that is not
imitated. A teacher is asked beside generation and training, one group at a time, so the engines that sample are never
waited for.

One teacher may be the policy itself some versions back (``snapshots``), and the folder of any other may be a link that
is made to point elsewhere (``linked_weights``). Their weights change between two groups, and every answer carries the
version it was computed with.

What is wrong with one group (an unknown teacher, a token that the teacher does not have, an answer that is not finite)
is raised for that group alone, and so is an answer that is late; a teacher that has died ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.data import masks
from headrace.data.samples import sequence_masks, sequences
from headrace.errors import DeadlineError, ModelError, TaskError
from headrace.protocols import Engine
from headrace.runtime.linked_weights import LinkedWeights
from headrace.runtime.snapshots import DelayedWeights
from headrace.runtime.state import TEACHER
from headrace.types import Episode, SamplingMask, ScoreColumn, Task, TeacherScores, WeightManifest

COLUMN = "teacher"
"""Of a task: who is to be imitated."""
NOBODY = "none"


@dataclass(slots=True)
class Teacher:
    engine: Engine
    vocab_size: int | None = None
    """Tokens it has; None: not known, so nothing is checked."""
    snapshots: DelayedWeights | None = None
    """How it follows the policy; None: it does not."""
    link: LinkedWeights | None = None
    """Where its weights lie, if that can change; None: it cannot."""
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def version(self) -> int:
        if self.link is not None:
            return await self.link.current()
        return 0 if self.snapshots is None else self.snapshots.version


class Teachers:
    """A source of the scoring stage, which asks about a group when all its attempts have ended."""

    name = TEACHER
    required = True
    per_attempt = False
    concurrency = 2**31
    # A question has a deadline of its own, after which the run ends; teachers are asked one group at a time.
    deadline_s: float | None = None

    def __init__(
        self,
        teachers: Mapping[str, Teacher],
        *,
        top_k: int,
        deadline_s: float,
        vocab_size: int | None = None,
    ) -> None:
        """The first is asked about tasks that name none. ``top_k`` 0: only the sampled tokens are scored.
        ``vocab_size`` is the student's; a teacher's embedding may be padded to more."""
        self._teachers = dict(teachers)
        self._top_k = top_k
        self._deadline_s = deadline_s
        self._vocab_size = vocab_size

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(teacher.engine for teacher in self._teachers.values())

    async def scores(self, group: int, episodes: Sequence[Episode]) -> tuple[TeacherScores, ...] | None:
        """Of each sample, in the order of ``build_samples``; None: nobody is imitated in this task."""
        name = self._name_for(episodes[0])
        if name is None:
            return None
        teacher, asked, kept = self._teachers[name], sequences(episodes), sequence_masks(episodes)
        self._check_tokens(name, [ids for ids, _ in asked])
        async with teacher.asking:
            while True:
                version = await teacher.version()
                answers: dict[int, TeacherScores] = {}
                for temperature in sorted({temperature for _, temperature in asked}):
                    places = [i for i, (_, its) in enumerate(asked) if its == temperature]
                    token_ids, sets = [asked[i][0] for i in places], [kept[i] for i in places]
                    scored = await self._ask(name, token_ids, sets, temperature, group)
                    answers.update(zip(places, scored, strict=True))
                # A change of weights that fell between is rare, and the question is then put again.
                if await teacher.version() == version:
                    break
        return tuple(replace(answers[i], teacher=name, version=version) for i in range(len(asked)))

    async def score(self, task: Task, episodes: Sequence[Episode]) -> list[ScoreColumn]:
        scored = await self.scores(episodes[0].group, episodes)
        columns, first = [], 0
        for episode in episodes:
            last = first + len(sequences([episode]))
            columns.append(
                ScoreColumn(
                    source=self.name,
                    group=episode.group,
                    attempt=episode.attempt,
                    teacher=None if scored is None else scored[first:last],
                )
            )
            first = last
        return columns

    async def landed(self, manifest: WeightManifest) -> list[int]:
        """The policy's engines have these weights. Returns the versions whose bytes no teacher needs."""
        followers = [teacher for teacher in self._teachers.values() if teacher.snapshots is not None]
        if not followers:
            return [manifest.version]
        (teacher,) = followers
        assert teacher.snapshots is not None
        # An answer under way is computed with one version throughout.
        async with teacher.asking:
            return await teacher.snapshots.landed(manifest)

    async def look(self, version: int) -> None:
        """The policy has reached this version: teachers whose folders are links get what these point to now."""
        links = [teacher.link for teacher in self._teachers.values() if teacher.link is not None]
        await asyncio.gather(*(link.look(version) for link in links))

    def _name_for(self, episode: Episode) -> str | None:
        chosen = episode.task.columns.get(COLUMN, next(iter(self._teachers)))
        if chosen == NOBODY:
            return None
        if chosen not in self._teachers:
            raise TaskError(
                f"task {episode.task.id}: its column {COLUMN} names {chosen!r}, but the teachers are "
                f"{', '.join(self._teachers)}; correct the column, or add the teacher to distill.teachers"
            )
        return str(chosen)

    def _check_tokens(self, name: str, token_ids: Sequence[np.ndarray]) -> None:
        limit = self._teachers[name].vocab_size
        largest = max((int(ids.max()) for ids in token_ids if len(ids)), default=0)
        if limit is not None and largest >= limit:
            raise ModelError(
                f"teacher {name!r} has {limit} tokens and cannot score token {largest}; give it the policy's tokenizer"
            )

    async def _ask(
        self,
        name: str,
        token_ids: list[np.ndarray],
        kept: list[SamplingMask | None],
        temperature: float,
        group: int,
    ) -> list[TeacherScores]:
        engine = self._teachers[name].engine
        try:
            async with asyncio.timeout(self._deadline_s):
                if self._top_k:
                    scored = await engine.score_top(token_ids, top_k=self._top_k, temperature=temperature)
                else:
                    logprobs = await self._logprobs(name, token_ids, kept, temperature)
                    scored = [TeacherScores(logprobs=values) for values in logprobs]
        except TimeoutError:
            raise DeadlineError(
                f"waited {self._deadline_s:g} s for {engine.name} to score group {group}; look at its log, or raise "
                "run.stall_s"
            ) from None
        if len(scored) != len(token_ids):
            raise ModelError(
                f"teacher {name!r} scored {len(scored)} of {len(token_ids)} sequences of group {group}; restart it"
            )
        for ids, scores in zip(token_ids, scored, strict=True):
            _check_scores(name, group, ids, scores)
        return [self._within_vocabulary(scores) for scores in scored]

    async def _logprobs(
        self, name: str, token_ids: list[np.ndarray], kept: list[SamplingMask | None], temperature: float
    ) -> list[np.ndarray]:
        """Over the kept sets, as far as the teacher has their ids: the others it would never draw."""
        engine, limit = self._teachers[name].engine, self._teachers[name].vocab_size
        if all(mask is None for mask in kept):
            return await engine.score(token_ids, temperature=temperature)
        if limit is not None:
            kept = [None if mask is None else masks.below(mask, limit) for mask in kept]
        return await engine.score(token_ids, temperature=temperature, masks=kept)

    def _within_vocabulary(self, scores: TeacherScores) -> TeacherScores:
        """Entries that the student does not have count to the rest."""
        if self._vocab_size is None or scores.top_ids is None or scores.top_logprobs is None:
            return scores
        known = scores.top_ids < self._vocab_size
        if known.all():
            return scores
        return replace(
            scores,
            top_ids=np.where(known, scores.top_ids, 0).astype(np.int32),
            top_logprobs=np.where(known, scores.top_logprobs, -np.inf).astype(np.float32),
        )


def _check_scores(name: str, group: int, token_ids: np.ndarray, scores: TeacherScores) -> None:
    if len(scores.logprobs) != len(token_ids):
        raise ModelError(
            f"teacher {name!r} answered {len(scores.logprobs)} scores for {len(token_ids)} tokens of group {group}; "
            "restart it"
        )
    if not np.isfinite(scores.logprobs).all() or (
        scores.top_logprobs is not None and not (scores.top_logprobs <= 1e-3).all()
    ):
        raise ModelError(
            f"teacher {name!r} answered scores of group {group} that are no log-probabilities; check its weights"
        )
