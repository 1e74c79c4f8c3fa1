"""New weights reach every engine while the trainer goes on.

``publish`` runs between two training steps: it tells the engines to get ready (what that means is the
interrupt mode), copies the weights out of the trainer and returns. ``land`` then runs beside the
next step: every engine applies the bundle between two of its own forward passes, and only after the
last one has acknowledged are the slots of the step released and, in the end, the bytes retired. Updates
land in order of version. Each wait has a deadline that says which engine was waited for.

An engine that cannot take a bundle (another base, torn bytes, joined late) goes on with its old weights and is
named to ``warn``; it then gets all weights, as they are at the trainer's next pause. The update counts as landed
only when it has them, and one that fails twice ends the run. Updates up to what it has by then pass it by.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
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
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``drain_s`` bounds the wait for running requests to finish in ``drain`` mode, ``step_s`` that for a
        trainer in the middle of a step."""
        self._engines = engines
        self._trainer = trainer
        self._mode = mode
        self._deadline_s = deadline_s
        self._drain_s = max(drain_s, deadline_s)
        self._step_s = max(step_s, deadline_s)
        self._warn = warn
        self._landing = asyncio.Lock()
        self._caught_up: dict[str, int] = {}
        """By engine, the version it caught up with, which may be ahead of the others'."""
        self.version = -1
        """The version every engine has."""

    async def publish(self, version: int) -> WeightManifest:
        """Copy the trainer's weights out. ``drain`` is left to ``land``: it must not hold up the trainer."""
        publishing = f"publishing version {version}"
        if self._mode != "block":
            return await self._within(publishing, self._trainer.publish(version), self._deadline_s)
        async with self._landing, self._resume_on_failure():
            await self._each(self._engines, "begin_update(block)", lambda e: e.begin_update("block"))
            return await self._within(publishing, self._trainer.publish(version), self._deadline_s)

    async def land(self, manifest: WeightManifest) -> None:
        """Apply on every engine."""
        async with self._landing, self._resume_on_failure():
            ahead = [e for e in self._engines if self._caught_up.get(e.name, -1) >= manifest.version]
            await self._each(ahead, "cancel_update", lambda e: e.cancel_update())
            due = [e for e in self._engines if e not in ahead]
            missed = await self._update(due, manifest, begin=self._mode in ("drain", "abort"))
            if missed:
                await self._catch_up(missed)
            self.version = manifest.version

    async def _update(
        self, engines: Sequence[Engine], manifest: WeightManifest, *, begin: bool
    ) -> dict[Engine, WeightSyncError]:
        """Apply on these engines; returns those that could not take the bundle."""
        mode, wait_s = self._mode, self._drain_s if self._mode == "drain" else self._deadline_s
        if begin:
            await self._each(engines, f"begin_update({mode})", lambda e: e.begin_update(mode), wait_s)
        outcomes = await self._each(engines, f"applying version {manifest.version}", self._apply(manifest))
        return {
            engine: outcome
            for engine, outcome in zip(engines, outcomes, strict=True)
            if isinstance(outcome, WeightSyncError)
        }

    def _apply(self, manifest: WeightManifest) -> Callable[[Engine], Awaitable[WeightSyncError | None]]:
        async def apply(engine: Engine) -> WeightSyncError | None:
            try:
                version = await engine.apply(manifest)
            except WeightSyncError as error:
                return error
            if version == manifest.version:
                return None
            return WeightSyncError(
                f"{engine.name} answered version {version} to an update to {manifest.version}; restart it"
            )

        return apply

    async def _catch_up(self, missed: Mapping[Engine, WeightSyncError]) -> None:
        for engine, error in missed.items():
            self._warn(f"{engine.name} keeps its old weights until it has all new ones: {error}")
        engines = list(missed)
        await self._each(engines, "cancel_update", lambda e: e.cancel_update())
        whole = await self._within("publishing all weights", self._trainer.publish_whole(), self._step_s)
        failed = await self._update(engines, whole, begin=self._mode != "never")
        for error in failed.values():
            raise error
        self._caught_up |= {engine.name: whole.version for engine in engines}

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

    async def _each(
        self,
        engines: Sequence[Engine],
        what: str,
        call: Callable[[Engine], Awaitable[T]],
        deadline_s: float | None = None,
    ) -> list[T]:
        wait_s = deadline_s or self._deadline_s

        async def one(engine: Engine) -> T:
            # The call is made only here: one that is cancelled before it begins must leave nothing unawaited.
            return await self._within(f"{what} on {engine.name}", call(engine), wait_s)

        return await asyncio.gather(*map(one, engines))

    async def _within(self, what: str, wait: Awaitable[T], deadline_s: float) -> T:
        try:
            async with asyncio.timeout(deadline_s):
                return await wait
        except TimeoutError:
            raise DeadlineError(
                f"waited {deadline_s:g} s for {what}; raise run.stall_s if the model is large"
            ) from None
