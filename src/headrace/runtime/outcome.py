"""Rewards for whole attempts as a source of the scoring stage.

In: a ``Scorer`` (reward functions, judges, in whatever process they run). Out: one column of rewards an attempt. Reward
functions compare the attempts of a group, so they are asked once all of them have ended. Without a reward nothing
can be learnt: the group is dropped as failed, under the error budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.protocols import Scorer
from headrace.types import Episode, ScoreColumn, Task


class OutcomeSource:
    name = "outcome"
    required = True
    per_attempt = False
    # The scorer bounds its own calls and their number.
    deadline_s: float | None = None

    def __init__(self, scorer: Scorer, *, concurrency: int) -> None:
        self._scorer = scorer
        self.concurrency = concurrency

    async def score(self, task: Task, episodes: Sequence[Episode]) -> list[ScoreColumn]:
        rewards = await self._scorer.score(task, episodes)
        return [
            ScoreColumn(source=self.name, group=e.group, attempt=e.attempt, rewards=dict(values))
            for e, values in zip(episodes, rewards, strict=True)
        ]
