"""From a scored group to tasks for branch groups, and what their outcomes teach. Pure.

In: the attempts of an ordinary group with their returns, and what a judge thought of their steps. Out: for some failed
attempts a ``Task`` that begins at a pivot inside them. A branch group is then a group like any other: it is journalled,
buffered, bounded in age and trained as one, its attempts are compared with each other alone, and what lies before the
pivot is part of its prompt, so it is not trained on again.

``PivotMemory`` is the part of the controller's state that belongs to this; like all of it, a fold over the journal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.algos.pivots import WINDOW, PivotRule, SuccessModel, before_the_worst, draw_pivot, fit_success
from headrace.types import Episode, ForkPoint, Pivot, Task, Turn


@dataclass(slots=True)
class PivotMemory:
    waiting: list[Task] = field(default_factory=list)
    """Pivots that no branch group was begun for yet, the oldest first."""
    depths: list[float] = field(default_factory=list)
    successes: list[bool] = field(default_factory=list)
    """Outcomes of branch groups: where they began, and whether any branch succeeded."""
    num_groups: int = 0
    """Branch groups begun."""
    num_discarded: int = 0
    """Pivots for which there was never room."""

    def found(self, tasks: Sequence[Task], room: int) -> None:
        """Remember pivots; the oldest are discarded where there are more than ``room``."""
        self.waiting += tasks
        surplus = max(0, len(self.waiting) - room)
        self.num_discarded += surplus
        del self.waiting[:surplus]

    def begun(self, task: Task) -> None:
        self.waiting = [other for other in self.waiting if other.id != task.id]
        self.num_groups += 1

    def explored(self, depth: float, success: bool) -> None:
        self.depths = [*self.depths[-(WINDOW - 1) :], depth]
        self.successes = [*self.successes[-(WINDOW - 1) :], success]

    def model(self) -> SuccessModel:
        return fit_success(self.depths, self.successes)

    def snapshot(self) -> dict[str, Any]:
        return {
            "waiting": list(self.waiting),
            "depths": np.array(self.depths, dtype=np.float64),
            "successes": np.array(self.successes, dtype=bool),
            "num_groups": self.num_groups,
            "num_discarded": self.num_discarded,
        }

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> PivotMemory:
        lists = {name: snapshot[name].tolist() for name in ("depths", "successes")}
        return cls(**{**snapshot, **lists})


def find_pivots(
    episodes: Sequence[Episode],
    returns: Sequence[float],
    rule: PivotRule,
    model: SuccessModel,
    *,
    seed: int,
    steps: Mapping[int, tuple[np.ndarray, np.ndarray]] | None = None,
) -> list[Task]:
    """Tasks for some of the attempts that failed, at most ``per_group``. Attempts of several turns or
    trajectories have no pivots: what an environment did in between could not be repeated. ``steps``: by attempt, where
    its steps end and their scores, of those that were judged to the end."""
    tasks: list[Task] = []
    failed = [e for e, value in zip(episodes, returns, strict=True) if value < rule.success]
    if not failed:
        return tasks
    draw = np.random.default_rng(_seed(seed, failed[0].group))
    for i in draw.permutation(len(failed)).tolist():
        if len(tasks) == rule.per_group:
            break
        turns = [turn for trajectory in failed[i].trajectories for turn in trajectory.turns]
        if len(turns) == 1:
            judged = (steps or {}).get(failed[i].attempt)
            at_most = None if judged is None else before_the_worst(*judged)
            num_kept = draw_pivot(turns[0].completion.token_ids, rule, model, draw, at_most=at_most)
            if num_kept is not None:
                tasks.append(_branch_task(failed[i], turns[0], num_kept))
    return tasks


def request_id(group: int, attempt: int, turn: int) -> str:
    return f"{group}/{attempt}/{turn}"


def any_success(returns: Sequence[float], rule: PivotRule) -> bool:
    return any(value >= rule.success for value in returns)


def start_versions(episodes: Sequence[Episode]) -> list[int]:
    """The versions that drew the first tokens of the attempts, each once."""
    turns = [turn for e in episodes for t in e.trajectories for turn in t.turns[:1]]
    return sorted({int(turn.completion.versions[0]) for turn in turns if turn.completion.num_tokens})


def _branch_task(episode: Episode, turn: Turn, num_kept: int) -> Task:
    num_tokens = len(turn.prompt_ids) + num_kept
    fork = ForkPoint(
        request_id=request_id(episode.group, episode.attempt, 0),
        num_tokens=num_tokens,
        version=_rows_version(turn.completion.kv_versions, num_tokens),
    )
    pivot = Pivot(
        prompt_ids=turn.prompt_ids,
        prefix_ids=turn.completion.token_ids[:num_kept],
        depth=num_kept / turn.completion.num_tokens,
        fork=fork,
        engine=turn.engine,
    )
    name = f"{episode.task.id}@{episode.group}/{episode.attempt}:{num_kept}"
    return replace(episode.task, id=name, pivot=pivot)


def _rows_version(kv_versions: np.ndarray, num_rows: int) -> int:
    """The version that wrote the first so many rows; -1: more than one did, or nobody knows."""
    if not len(kv_versions) or int(kv_versions[0, 1]) < num_rows:
        return -1
    return int(kv_versions[0, 0])


def _seed(seed: int, group: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{group}/pivots".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
