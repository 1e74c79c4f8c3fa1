"""Which engine serves the next request: the live one with the fewest requests under way.

A group's first request picks the engine; its other attempts follow while the loads stay close, since
they share the prompt's key-value blocks there. A group that is bound to an engine, because it goes on from what that
one computed, stays there whatever the loads are, so that its attempts begin under one version of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.protocols import Engine


class Router:
    def __init__(self, engines: Sequence[Engine], *, affinity: int = 8) -> None:
        """``affinity``: how many more requests than the least loaded engine a group's own may have."""
        self.engines = tuple(engines)
        self._affinity = affinity
        self._load = [0] * len(self.engines)
        self._home: dict[int, int] = {}
        self._bound: set[int] = set()
        self._leases: dict[int, dict[str, int]] = {}
        """Engine by request, by group."""

    def bind(self, group: int, engine: str) -> None:
        """Send the group to this engine alone; to the least loaded one if there is none of that name."""
        names = [e.name for e in self.engines]
        self._home[group] = names.index(engine) if engine in names else self._load.index(min(self._load))
        self._bound.add(group)

    def lease(self, group: int, request_id: str) -> Engine:
        """The engine to ask; it counts as busy with the request until ``release``."""
        least = self._load.index(min(self._load))
        home = self._home.setdefault(group, least)
        stays = group in self._bound
        index = home if stays or self._load[home] <= self._load[least] + self._affinity else least
        self._home[group] = index
        self._load[index] += 1
        self._leases.setdefault(group, {})[request_id] = index
        return self.engines[index]

    def release(self, group: int, request_id: str) -> None:
        self._load[self._leases[group].pop(request_id)] -= 1

    async def abort(self, group: int) -> None:
        """Ask the engines to hand back what this group's requests have sampled."""
        leases = self._leases.get(group, {})
        for index, engine in enumerate(self.engines):
            mine = [request_id for request_id, at in leases.items() if at == index]
            if mine:
                await engine.abort(mine)

    async def release_holds(self, engine: str, request_ids: Sequence[str]) -> None:
        """Nobody will branch off these finished requests."""
        for candidate in self.engines:
            if candidate.name == engine:
                await candidate.release(request_ids)

    def forget(self, group: int) -> None:
        self._bound.discard(group)
        self._home.pop(group, None)
        self._leases.pop(group, None)
