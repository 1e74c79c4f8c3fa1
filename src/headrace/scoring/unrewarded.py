"""No reward at all: for runs whose only signal is a teacher.

In: any group. Out: the same 0 for every episode, so that no advantage points anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.types import Episode, Task


class Unrewarded:
    async def score(self, task: Task, episodes: Sequence[Episode]) -> list[Mapping[str, float | None]]:
        return [{"unrewarded": 0.0} for _ in episodes]

    async def close(self) -> None:
        """Nothing is held."""
