"""New weights reach every engine while the trainer goes on.

``publish`` runs between two training steps: it tells the engines to get ready (what that means is the
interrupt mode), copies the weights out of the trainer and returns. ``land`` then runs beside the
next step: every engine applies the bundle between two of its own forward passes, and only after the
last one has acknowledged are the slots of the step released and, in the end, the bytes retired. Updates
land in order of version. Each wait has a deadline that says which engine was waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from headrace.errors import DeadlineError, WeightSyncError
from headrace.protocols import Engine, Trainer
from headrace.types import InterruptMode, WeightManifest

T = TypeVar("T")


class WeightSync:
    def __init__(
        self,
        engines: Sequence[Engine],
        trainer: Trainer,
        *,
        mode: InterruptMode,
        deadline_s: float,
        drain_s: float,
        step_s: float,
    ) -> None:
        """``drain_s`` bounds the wait for running requests to finish in ``drain`` mode, ``step_s`` that for a
        trainer in the middle of a step."""
        self._engines = engines
        self._trainer = trainer
        self._mode = mode
        self._deadline_s = deadline_s
        self._drain_s = max(drain_s, deadline_s)
        self._step_s = max(step_s, deadline_s)
        self._landing = asyncio.Lock()
        self.version = -1
        """The version every engine has."""

    async def publish(self, version: int) -> WeightManifest:
        """Copy the trainer's weights out. ``drain`` is left to ``land``: it must not hold up the trainer."""
        publishing = f"publishing version {version}"
        if self._mode != "block":
            return await self._within(publishing, self._trainer.publish(version), self._deadline_s)
        async with self._landing, self._resume_on_failure():
            await self._each("begin_update(block)", lambda e: e.begin_update("block"), self._deadline_s)
            return await self._within(publishing, self._trainer.publish(version), self._deadline_s)

    async def land(self, manifest: WeightManifest) -> None:
        """Apply on every engine."""
        async with self._landing, self._resume_on_failure():
            if self._mode in ("drain", "abort"):
                mode, wait_s = self._mode, self._drain_s if self._mode == "drain" else self._deadline_s
                await self._each(f"begin_update({mode})", lambda e: e.begin_update(mode), wait_s)
            applied = await self._each(
                f"applying version {manifest.version}", lambda e: e.apply(manifest), self._deadline_s
            )
            for engine, version in zip(self._engines, applied, strict=True):
                if version != manifest.version:
                    raise WeightSyncError(
                        f"{engine.name} answered version {version} to an update to "
                        f"{manifest.version}; restart it"
                    )
            self.version = manifest.version

    async def retire(self, version: int) -> None:
        """Give the bytes back. The trainer may be in the middle of a step and answer only after it, so nothing
        else may wait for this."""
        await self._within(f"retiring version {version}", self._trainer.retire(version), self._step_s)

    @asynccontextmanager
    async def _resume_on_failure(self) -> AsyncIterator[None]:
        """An update that fails leaves no engine waiting for it."""
        try:
            yield
        except BaseException:
            await asyncio.gather(*(e.cancel_update() for e in self._engines), return_exceptions=True)
            raise

    async def _each(self, what: str, call: Callable[[Engine], Awaitable[T]], deadline_s: float) -> list[T]:
        return await asyncio.gather(
            *(self._within(f"{what} on {e.name}", call(e), deadline_s) for e in self._engines)
        )

    async def _within(self, what: str, wait: Awaitable[T], deadline_s: float) -> T:
        try:
            async with asyncio.timeout(deadline_s):
                return await wait
        except TimeoutError:
            raise DeadlineError(
                f"waited {deadline_s:g} s for {what}; raise weights.deadline_s if the model is large"
            ) from None
