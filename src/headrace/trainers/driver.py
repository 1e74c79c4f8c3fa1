"""The trainer protocol over ``TorchTrainer``.

In: coroutine calls. Out: the core's answers, one call at a time and in order. ``threaded`` runs the core on
one worker thread, so that the event loop answers ``status`` during a step; without it everything runs
in the caller's thread, in an order that depends on nothing but the calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import RoleStatus, StepResult, TrainBatch, WeightManifest

Answer = TypeVar("Answer")


class TrainerDriver:
    """``protocols.Trainer`` for a trainer in this process."""

    def __init__(self, core: TorchTrainer, *, threaded: bool, role: str = "trainer") -> None:
        self._core = core
        self._role = role
        self._thread: ThreadPoolExecutor | None = None
        if threaded:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=role, initializer=core.bind_thread)

    async def step(self, batch: TrainBatch) -> StepResult:
        return await self._run(lambda: self._core.step(batch))

    async def step_share(self, parts: Sequence[TrainBatch]) -> StepResult:
        """One of several ranks: this one's share of every minibatch."""
        return await self._run(lambda: self._core.step_parts(parts))

    async def publish_share(self, version: int | None) -> WeightManifest | None:
        """One of several ranks: its part in ``publish``, or with None in ``publish_whole``."""
        return await self._run(lambda: self._core.publish_share(version))

    async def publish(self, version: int) -> WeightManifest:
        return await self._run(lambda: self._core.publish(version))

    async def publish_whole(self) -> WeightManifest:
        return await self._run(self._core.publish_whole)

    async def retire(self, version: int) -> None:
        await self._run(lambda: self._core.retire(version))

    async def save(self, directory: Path) -> None:
        await self._run(lambda: self._core.save(directory))

    async def load(self, directory: Path) -> int:
        return await self._run(lambda: self._core.load(directory))

    async def status(self) -> RoleStatus:
        core = self._core
        return RoleStatus(
            role=self._role,
            version=core.version,
            progress=core.num_tokens,
            seconds=core.ledger.seconds(),
            counters={
                "num_steps": float(core.num_steps),
                "num_tokens": float(core.num_tokens),
                "num_weights": float(core.num_weights),
            },
        )

    async def close(self) -> None:
        """Waits for a call in progress: bytes being written are finished first."""
        await self._run(self._core.close)
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    async def _run(self, call: Callable[[], Answer]) -> Answer:
        if self._thread is None:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
