"""Which engine serves the next request: the live one with the fewest requests under way.

A group's first request picks the engine; its other attempts follow while the loads stay close, since
they share the prompt's key-value blocks there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.protocols import Engine


class Router:
    def __init__(self, engines: Sequence[Engine], *, affinity: int = 8) -> None:
        """``affinity``: how many more requests than the least loaded engine a group's own may have."""
        self.engines = tuple(engines)
        self._affinity = affinity
        self._load = [0] * len(self.engines)
        self._home: dict[str, int] = {}
        self._leases: dict[str, int] = {}

    @contextmanager
    def lease(self, request_id: str) -> Iterator[Engine]:
        group = request_id.split("/", 1)[0]
        index = self._pick(group)
        self._home[group] = index
        self._load[index] += 1
        self._leases[request_id] = index
        try:
            yield self.engines[index]
        finally:
            self._load[index] -= 1
            del self._leases[request_id]

    def _pick(self, group: str) -> int:
        least = min(range(len(self.engines)), key=lambda i: (self._load[i], i))
        home = self._home.get(group, least)
        return home if self._load[home] <= self._load[least] + self._affinity else least

    async def abort(self, group: int) -> None:
        """Ask the engines to hand back what this group's requests have sampled."""
        for index, engine in enumerate(self.engines):
            mine = [r for r, i in self._leases.items() if i == index and r.split("/", 1)[0] == str(group)]
            if mine:
                await engine.abort(mine)

    def forget(self, group: int) -> None:
        self._home.pop(str(group), None)
