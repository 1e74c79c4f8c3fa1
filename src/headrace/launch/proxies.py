"""Roles in other processes behind the protocols of this one.

In: calls of ``protocols.Engine``, ``Trainer``, ``Scorer`` and ``StepScorer``. Out: the same calls over ``rpc``, each
with a deadline. ``role_methods`` is the other half of the table. ``close`` closes the role object; its process
is ended by the cluster it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.launch.rpc import Caller
from headrace.types import (
    Completion,
    Episode,
    InterruptMode,
    Request,
    RoleStatus,
    SamplingMask,
    StepQuestion,
    StepResult,
    StepScores,
    Task,
    TeacherScores,
    TrainBatch,
    WeightManifest,
)

DEADLINES_S: Mapping[str, float] = MappingProxyType(
    {
        "generate": 3600.0,
        "abort": 120.0,
        "release": 120.0,
        "score": 600.0,
        "score_steps": 600.0,
        "score_top": 600.0,
        "begin_update": 3600.0,
        "apply": 600.0,
        "cancel_update": 120.0,
        "step": 3600.0,
        "step_share": 3600.0,
        "publish": 600.0,
        "publish_whole": 3600.0,
        "publish_share": 600.0,
        "retire": 600.0,
        "save": 1800.0,
        "load": 1800.0,
        "status": 600.0,
        "close": 60.0,
    }
)
"""Upper bounds for a role that hangs. A role answers between two pieces of work, so even ``status`` may have
to wait for the end of a long one; whoever can wait less puts its own deadline around the call."""
_SHORT = ("abort", "release", "cancel_update", "close")
"""Nobody sets a deadline for these."""


def deadlines(longest_s: float) -> Mapping[str, float]:
    """The bounds of a run in which deadlines are set up to so long: none of those is cut short here."""
    return {name: bound if name in _SHORT else max(bound, longest_s) for name, bound in DEADLINES_S.items()}


class RemoteEngine:
    def __init__(self, caller: Caller, deadlines_s: Mapping[str, float] = DEADLINES_S) -> None:
        self.name = caller.role
        self._caller = caller
        self._deadlines_s = deadlines_s

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._caller.call(method, *args, deadline_s=self._deadlines_s[method])

    async def generate(
        self, request: Request, on_progress: Callable[[Completion], None] | None = None
    ) -> Completion:
        return await self._caller.call(
            "generate", request, deadline_s=self._deadlines_s["generate"], on_note=on_progress
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call("abort", list(request_ids))

    async def release(self, request_ids: Sequence[str]) -> None:
        await self._call("release", list(request_ids))

    async def score(
        self,
        token_ids: Sequence[np.ndarray],
        *,
        temperature: float = 1.0,
        policy: str = "policy",
        masks: Sequence[SamplingMask | None] | None = None,
    ) -> list[np.ndarray]:
        sets = [] if masks is None else [list(masks)]
        return await self._call("score", list(token_ids), temperature, policy, *sets)

    async def score_top(
        self, token_ids: Sequence[np.ndarray], *, top_k: int, temperature: float = 1.0, policy: str = "policy"
    ) -> list[TeacherScores]:
        return await self._call("score_top", list(token_ids), top_k, temperature, policy)

    async def begin_update(self, mode: InterruptMode) -> None:
        await self._call("begin_update", mode)

    async def apply(self, manifest: WeightManifest) -> int:
        return await self._call("apply", manifest)

    async def cancel_update(self) -> None:
        await self._call("cancel_update")

    async def status(self) -> RoleStatus:
        return await self._call("status")

    async def close(self) -> None:
        await self._call("close")


class RemoteTrainer:
    def __init__(self, caller: Caller, deadlines_s: Mapping[str, float] = DEADLINES_S) -> None:
        self._caller = caller
        self._deadlines_s = deadlines_s

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._caller.call(method, *args, deadline_s=self._deadlines_s[method])

    async def step(self, batch: TrainBatch) -> StepResult:
        return await self._call("step", batch)

    async def publish(self, version: int) -> WeightManifest:
        return await self._call("publish", version)

    async def publish_whole(self) -> WeightManifest:
        return await self._call("publish_whole")

    async def retire(self, version: int) -> None:
        await self._call("retire", version)

    async def save(self, directory: Path) -> None:
        await self._call("save", str(directory.absolute()))

    async def load(self, directory: Path) -> int:
        return await self._call("load", str(directory.absolute()))

    async def status(self) -> RoleStatus:
        return await self._call("status")

    async def close(self) -> None:
        await self._call("close")


class RemoteScorer:
    def __init__(self, caller: Caller, deadlines_s: Mapping[str, float] = DEADLINES_S) -> None:
        self._caller = caller
        self._deadlines_s = deadlines_s

    async def score(self, task: Task, episodes: Sequence[Episode]) -> list[Mapping[str, float | None]]:
        deadline_s = self._deadlines_s["score"]
        return await self._caller.call("score", task, list(episodes), deadline_s=deadline_s)

    async def close(self) -> None:
        await self._caller.call("close", deadline_s=self._deadlines_s["close"])


class RemoteStepScorer:
    def __init__(self, caller: Caller, deadlines_s: Mapping[str, float] = DEADLINES_S) -> None:
        self._caller = caller
        self._deadlines_s = deadlines_s

    async def score_steps(self, question: StepQuestion) -> StepScores:
        return await self._caller.call("score_steps", question, deadline_s=self._deadlines_s["score_steps"])

    async def status(self) -> RoleStatus:
        return await self._caller.call("status", deadline_s=self._deadlines_s["status"])

    async def close(self) -> None:
        await self._caller.call("close", deadline_s=self._deadlines_s["close"])
