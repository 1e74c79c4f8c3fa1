"""The bounded rollout buffer: scored groups wait here until a step may train them.

In: groups that were scored, built into samples once. Out: one batch of exactly ``groups_per_step``
groups and the branch groups and late attempts that are ready, ordered by (group, attempt), never by arrival, so that
equal inputs give equal batches. What may be taken is decided by ``staleness.decide``; the buffer only waits for the
decision. Its size is bounded by the slots of admission, not here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.errors import DeadlineError
from headrace.runtime.plan import RunPlan
from headrace.runtime.staleness import Decision, decide
from headrace.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    group: int
    """Its number; of late attempts, their part's (``parts``)."""
    samples: tuple[Sample, ...]
    """Ordered by attempt."""
    oldest_version: int
    mean_return: float
    returns: tuple[float, ...] = ()
    """Of each attempt."""
    worth: tuple[float, ...] = ()
    """Of each trajectory that is trained, where these are compared and not attempts."""
    agents: tuple[str, ...] = ()
    """Whose each sample is, where a running mean is kept for each agent."""
    earned: tuple[tuple[str, float], ...] = ()
    """(agent, return) of each trajectory; likewise."""
    is_branch: bool = False
    """It rides along with a step, beyond its ``groups_per_step`` groups."""


class RolloutBuffer:
    def __init__(
        self,
        plan: RunPlan,
        unfinished: Callable[[], Mapping[int, int]],
        rides: Callable[[int], bool] = lambda group: False,
    ) -> None:
        """``unfinished`` maps each admitted group that is not here yet to its oldest possible version; ``rides`` tells
        those that ride along with a step."""
        self._plan = plan
        self._rides = rides
        self.next_version = 0
        """What the step starts from whose batch is not decided yet."""
        self._unfinished = unfinished
        self._ready: dict[int, ReadyGroup] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    def put(self, group: ReadyGroup) -> None:
        self._ready[group.group] = group
        self.notify()

    def remove(self, group: int) -> ReadyGroup:
        return self._ready.pop(group)

    def __contains__(self, group: int) -> bool:
        return group in self._ready

    def notify(self) -> None:
        """Something the decision depends on has changed."""
        self._changed.set()

    def decide(self, version: int) -> Decision:
        unfinished = self._unfinished()
        return decide(
            {g: ready.oldest_version for g, ready in self._ready.items()},
            unfinished,
            branches={g for g in (*self._ready, *unfinished) if self._rides(g)},
            version=version,
            groups_per_step=self._plan.groups_per_step,
            max_lag=self._plan.max_lag,
            policy=self._plan.staleness,
        )

    async def take(
        self, version: int, *, on_stale: Callable[[int], None], progress: Callable[[], int]
    ) -> tuple[ReadyGroup, ...]:
        """The groups of the step that starts from ``version``. ``on_stale`` ends groups that no step can
        train any more. Waits as long as ``progress`` moves within the plan's ``stall_s``."""
        seen, self.next_version = progress(), version
        while True:
            decision = self.decide(version)
            for group in decision.drop:
                on_stale(group)
            if decision.take is not None:
                self.next_version = version + 1
                return tuple(self._ready.pop(group) for group in decision.take)
            self._changed.clear()
            try:
                async with asyncio.timeout(self._plan.stall_s):
                    await self._changed.wait()
            except TimeoutError:
                if progress() == seen:
                    raise DeadlineError(
                        f"nothing moved for {self._plan.stall_s:g} s while the trainer waited for "
                        f"{decision.waits_for}; look at the engine and reward logs, or raise run.stall_s"
                    ) from None
            seen = progress()
