"""The starting policy as an engine of its own, which never gets new weights.

In: finished episodes, as a source of the scoring stage. Out: the log-probabilities of every token their samples will
have, at the temperatures they were sampled with and over the same kept sets. It is asked about each attempt as it
ends, one at a time, beside generation and training. A loss that needs the reference cannot do without: a group whose
answer is late is dropped as failed, and an engine that has died ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from headrace.data.samples import sequence_masks, sequences
from headrace.errors import DeadlineError
from headrace.protocols import Engine
from headrace.runtime.state import REFERENCE
from headrace.types import Episode, SamplingMask, ScoreColumn, Task


class ReferencePolicy:
    name = REFERENCE
    required = True
    per_attempt = True
    concurrency = 1
    # A question has a deadline of its own, which begins when it is its turn.
    deadline_s: float | None = None

    def __init__(self, engine: Engine, *, deadline_s: float) -> None:
        self._engine = engine
        self._deadline_s = deadline_s

    async def score(self, task: Task, episodes: Sequence[Episode]) -> list[ScoreColumn]:
        return [
            ScoreColumn(
                source=self.name,
                group=episode.group,
                attempt=episode.attempt,
                logprobs=await self.logprobs(episode.group, [episode]),
            )
            for episode in episodes
        ]

    async def logprobs(self, group: int, episodes: Sequence[Episode]) -> tuple[np.ndarray, ...]:
        """float32 [T] of each sample, in the order of ``build_samples``. Raises DeadlineError when the engine
        does not answer in time."""
        asked, masks = sequences(episodes), sequence_masks(episodes)
        answers: dict[int, np.ndarray] = {}
        for temperature in sorted({temperature for _, temperature in asked}):
            places = [i for i, (_, its) in enumerate(asked) if its == temperature]
            token_ids, kept = [asked[i][0] for i in places], [masks[i] for i in places]
            scored = await self._score(token_ids, kept, temperature, group)
            answers.update(zip(places, scored, strict=True))
        return tuple(answers[i] for i in range(len(asked)))

    async def _score(
        self, token_ids: list[np.ndarray], masks: list[SamplingMask | None], temperature: float, group: int
    ) -> list[np.ndarray]:
        try:
            async with asyncio.timeout(self._deadline_s):
                if all(mask is None for mask in masks):
                    return await self._engine.score(token_ids, temperature=temperature)
                return await self._engine.score(token_ids, temperature=temperature, masks=masks)
        except TimeoutError:
            raise DeadlineError(
                f"waited {self._deadline_s:g} s for {self._engine.name} to score group {group}; look at its log, "
                'raise run.stall_s, or set "kl.reference" in algo.options to trainer'
            ) from None
