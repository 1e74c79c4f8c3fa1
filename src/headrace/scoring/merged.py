"""Several scorers as one: a group's rewards from all of them, in one order of names.

In: scorers that each know some of the rewards. Out: one mapping per episode with every name, in the
order the weights follow. One that fails fails the group, as a single scorer would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from headrace.protocols import Scorer
from headrace.types import Episode, Task


class MergedScorer:
    def __init__(self, scorers: Sequence[Scorer], names: Sequence[str]) -> None:
        self._scorers = tuple(scorers)
        self._names = tuple(names)

    async def score(self, task: Task, episodes: Sequence[Episode]) -> list[Mapping[str, float | None]]:
        answers = await asyncio.gather(*(scorer.score(task, episodes) for scorer in self._scorers))
        merged = [{k: v for part in parts for k, v in part.items()} for parts in zip(*answers, strict=True)]
        return [{name: rewards[name] for name in self._names} for rewards in merged]

    async def close(self) -> None:
        await asyncio.gather(*(scorer.close() for scorer in self._scorers))
