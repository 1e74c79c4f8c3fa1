"""Several trainer processes as the one trainer the controller knows.

In: calls of ``protocols.Trainer``. Out: the same call on every rank at once, each with its share of the
batch. The ranks wait for each other inside a call, so they succeed or fail together: when one fails and others
have not answered within a grace period, those are waiting for it in vain and are ended. A call that fails
on all ranks leaves them ready for the next. The error raised is that of a rank that died, if one did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.data.dealing import deal
from headrace.errors import InvariantError
from headrace.launch.proxies import DEADLINES_S
from headrace.launch.role_process import RoleProcess
from headrace.types import RoleStatus, StepResult, TrainBatch, WeightManifest

GRACE_S = 10.0
"""How long after one rank's failure the others may still answer."""


class RankedTrainer:
    def __init__(
        self,
        ranks: Sequence[RoleProcess],
        *,
        num_minibatches: int,
        deadlines_s: Mapping[str, float] = DEADLINES_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._ranks = tuple(ranks)
        self._num_minibatches = num_minibatches
        self._deadlines_s = deadlines_s
        self._grace_s = grace_s

    async def step(self, batch: TrainBatch) -> StepResult:
        shares = deal(batch, num_ranks=len(self._ranks), num_minibatches=self._num_minibatches)
        results = await self._each("step_share", shares)
        return self._agreed("step_share", results)

    async def publish(self, version: int) -> WeightManifest:
        manifest, *_ = await self._each("publish_share", [version] * len(self._ranks))
        return manifest

    async def publish_whole(self) -> WeightManifest:
        manifest, *_ = await self._each("publish_share", [None] * len(self._ranks))
        return manifest

    async def retire(self, version: int) -> None:
        await self._ranks[0].caller.call("retire", version, deadline_s=self._deadlines_s["retire"])

    async def save(self, directory: Path) -> None:
        await self._each("save", [str(directory.absolute())] * len(self._ranks))

    async def load(self, directory: Path) -> int:
        versions = await self._each("load", [str(directory.absolute())] * len(self._ranks))
        return self._agreed("load", versions)

    async def status(self) -> RoleStatus:
        """The first rank's."""
        return await self._ranks[0].caller.call("status", deadline_s=self._deadlines_s["status"])

    async def close(self) -> None:
        await asyncio.gather(
            *(rank.caller.call("close", deadline_s=self._deadlines_s["close"]) for rank in self._ranks)
        )

    def _agreed(self, method: str, answers: Sequence[Any]) -> Any:
        if any(answer != answers[0] for answer in answers[1:]):
            raise InvariantError(f"the trainer's ranks answered {method!r} differently: {answers}")
        return answers[0]

    async def _each(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        """One call on every rank with its own argument; the answers in order of rank."""
        calls = [
            asyncio.create_task(
                rank.caller.call(method, argument, deadline_s=self._deadlines_s[method]),
                name=f"{rank.spec.name} {method}",
            )
            for rank, argument in zip(self._ranks, arguments, strict=True)
        ]
        try:
            _, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await asyncio.wait(pending, timeout=self._grace_s)
        except asyncio.CancelledError:
            for call in calls:
                call.cancel()
            raise
        errors = [call.exception() for call in calls if call.done()]
        stuck = [rank for rank, call in zip(self._ranks, calls, strict=True) if not call.done()]
        await asyncio.gather(*(rank.kill() for rank in stuck))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        dead = [rank.failure.result() for rank in self._ranks if rank.failure.done()]
        for error in [*dead, *errors]:
            if error is not None:
                raise error
        return answers
