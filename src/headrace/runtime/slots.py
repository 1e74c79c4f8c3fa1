"""Admission: how many groups may be under way, so that none is born stale.

Capacity is at most ``(max_lag + 1) * groups_per_step`` (``RunPlan.capacity``). A slot is charged when a
group is admitted. It is released when every live engine has the weights of the step that trained the group,
or at once when the group is dropped (its replacement then takes the slot). ``max_lag = 0`` leaves one batch of slots:
the next batch starts only after the weights of the last have arrived, which is synchronous training.
Branch groups have slots of their own, since they ride along with whatever step comes next. Late attempts, which ride
along too, have none: they began with their group, and there are at most a quarter of its number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from headrace.errors import InvariantError


class Slots:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: set[int] = set()
        self._released = asyncio.Event()

    @property
    def num_free(self) -> int:
        return self.capacity - len(self._held)

    def __contains__(self, group: int) -> bool:
        return group in self._held

    def charge(self, group: int) -> None:
        if self.num_free <= 0 or group in self._held:
            raise InvariantError(f"no slot for group {group}: {len(self._held)} of {self.capacity} are held")
        self._held.add(group)

    def release(self, groups: Iterable[int]) -> None:
        for group in groups:
            if group not in self._held:
                raise InvariantError(f"group {group} released a slot it does not hold")
            self._held.remove(group)
        self._released.set()

    async def wait_free(self, wanted: Callable[[], bool]) -> None:
        """Returns when a slot is free and another group is wanted. Nobody waits on admission but
        admission itself, so the deadline is the trainer's (``RolloutBuffer.take``)."""
        while self.num_free <= 0 or not wanted():
            self._released.clear()
            await self._released.wait()
