"""Branch groups: which pivots are kept, and when their groups begin.

In: every group once its returns are known. Out: pivots of the ordinary ones, outcomes of the branch groups, and new
branch groups, all as journal records. A pivot that is found now is a task for whichever step comes next.

A branch group begins when one of its own slots is free and the step whose batch is not decided yet could train what
the engines would sample now. It is bound to the engine that holds the keys and values it goes on from. The newest
pivot is taken first, because its weights are likeliest to be still the current ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.algos.pivots import PivotRule
from headrace.data.steps import PROCESS, is_whole
from headrace.runtime.journal import Record
from headrace.runtime.pivots import any_success, find_pivots, request_id
from headrace.runtime.plan import RunPlan
from headrace.runtime.slots import Slots
from headrace.runtime.state import LiveGroup, RunState
from headrace.types import Episode, Pivot


class Branching:
    def __init__(
        self,
        plan: RunPlan,
        state: RunState,
        *,
        record: Callable[[Record], None],
        start: Callable[[LiveGroup], None],
        release: Callable[[str, Sequence[str]], None],
        engines_version: Callable[[], int],
        next_version: Callable[[], int],
        wanted: Callable[[], bool],
    ) -> None:
        """``engines_version`` is what every engine has; ``next_version`` what the step starts from whose batch is
        not decided yet; ``wanted`` turns false when the run needs no more groups. ``release`` tells an engine that
        requests need not be held any longer."""
        self.slots = Slots(plan.branch_capacity)
        self._plan = plan
        self._state = state
        self._record = record
        self._start = start
        self._release = release
        self._engines_version = engines_version
        self._next_version = next_version
        self._wanted = wanted
        self._leaving: dict[int, Pivot] = {}
        """By branch group, what it goes on from."""

    def scored(self, live: LiveGroup, episodes: Sequence[Episode], returns: Sequence[float]) -> None:
        """In the same turn of the event loop as the record that says what becomes of the group, so that a group
        that is scored again after a crash is counted once."""
        rule = self._plan.pivots
        if rule is None:
            return
        if live.task.pivot is not None:
            depth = live.task.pivot.depth
            self._record({"kind": "explored", "depth": depth, "success": any_success(returns, rule)})
            self.ended(live.group)
            return
        self._find(live, episodes, returns, rule)
        self.begin()

    def _find(
        self, live: LiveGroup, episodes: Sequence[Episode], returns: Sequence[float], rule: PivotRule
    ) -> None:
        """Remember pivots of failed attempts; what nobody will branch off need not be held."""
        memory, tasks = self._state.pivots, []
        if self._wanted():
            tasks = find_pivots(
                episodes, returns, rule, memory.model(), seed=self._plan.seed, steps=judged_steps(live)
            )
        known = [task.pivot for task in (*memory.waiting, *tasks) if task.pivot is not None]
        if tasks:
            self._record({"kind": "pivots", "tasks": tasks, "room": self._plan.branch_capacity})
        kept = {task.pivot.fork.request_id for task in memory.waiting if task.pivot is not None}
        for pivot in known:
            if pivot.fork.request_id not in kept:
                self._release(pivot.engine, (pivot.fork.request_id,))
        self._release_others(episodes, kept)

    def begin(self) -> None:
        """Start the groups that there is room and time for."""
        waiting = self._state.pivots.waiting
        while waiting and self.slots.num_free and self._in_time() and self._wanted():
            task, group = waiting[-1], self._state.next_group
            self._record(
                {
                    "kind": "admit",
                    "group": group,
                    "task": task,
                    "attempts": self._plan.pivots.branches if self._plan.pivots is not None else 0,
                    "version": self._engines_version(),
                }
            )
            self.slots.charge(group)
            assert task.pivot is not None
            self._leaving[group] = task.pivot
            self._start(self._state.live(group))
            waiting = self._state.pivots.waiting

    def ended(self, group: int) -> None:
        """The group needs nothing more of what it went on from."""
        pivot = self._leaving.pop(group, None)
        if pivot is not None:
            self._release(pivot.engine, (pivot.fork.request_id,))

    def _in_time(self) -> bool:
        return self._next_version() - self._engines_version() <= self._plan.max_lag

    def _release_others(self, episodes: Sequence[Episode], kept: set[str]) -> None:
        """Attempts that nobody branches off are not held."""
        by_engine: dict[str, list[str]] = {}
        for episode in episodes:
            turns = [turn for trajectory in episode.trajectories for turn in trajectory.turns]
            for number, turn in enumerate(turns):
                name = request_id(episode.group, episode.attempt, number)
                if name not in kept:
                    by_engine.setdefault(turn.engine, []).append(name)
        for engine, names in by_engine.items():
            self._release(engine, names)


def judged_steps(live: LiveGroup) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """By attempt, (ends, scores) of the steps of those that the process judge has read to the end."""
    found = {}
    for attempt, column in live.columns.get(PROCESS, {}).items():
        ends, scores = column.step_ends, column.step_scores
        if (
            ends is not None
            and scores is not None
            and len(ends)
            and is_whole(column, live.num_sampled(attempt))
        ):
            found[attempt] = (ends, scores)
    return found
