"""A teacher whose folder is a link: when the link points elsewhere, its engine gets the weights that lie there.

    waits for                          unblocked by
    look: the engine to have them      its answer, or the deadline
    current: the engine's version      its answer, or the deadline

In: the link, looked at whenever a version of the policy has landed. Out: the engine computes with the new weights from
one of its passes on; it goes on answering while it reads them, and no other engine is spoken to. Invariant: ``current``
is what the engine computes with when it is asked, also while a change is under way.

A folder that does not fit, or cannot be read, is named to ``warn`` and left out; the engine goes on with what it has,
and the folder is not tried again until the link has pointed somewhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from headrace.errors import DeadlineError, ModelError, RoleError, WeightSyncError
from headrace.protocols import Engine
from headrace.types import WeightManifest

TRANSPORT = "checkpoint"
"""Names a manifest whose location is a saved model."""


class LinkedWeights:
    def __init__(
        self,
        engine: Engine,
        link: Path,
        *,
        deadline_s: float,
        check: Callable[[Path], None] = lambda folder: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """The engine has the weights the link points to now. ``check`` raises ModelError for a folder that cannot take
        their place."""
        self._engine = engine
        self._link = link
        self._deadline_s = deadline_s
        self._check = check
        self._warn = warn
        self._folder = self._seen = link.resolve()
        self._looking = asyncio.Lock()
        self._version = 0
        self._announced: int | None = None
        """A version the engine was told of and has not answered."""
        self.num_swaps = 0

    async def current(self) -> int:
        """The version the engine computes with: that of the policy when it was given its weights, 0 at the start."""
        if self._announced is not None:
            try:
                async with asyncio.timeout(self._deadline_s):
                    self._arrived((await self._engine.status()).version)
            except TimeoutError:
                raise RoleError(
                    f"waited {self._deadline_s:g} s for {self._engine.name} to say which weights it has; look at its "
                    "log, or raise run.stall_s"
                ) from None
        return self._version

    async def look(self, version: int) -> None:
        """The policy has reached this version. Returns when the engine has the weights behind the link, or cannot
        have them; at once while an earlier look goes on."""
        if self._looking.locked():
            return
        async with self._looking:
            folder = self._link.resolve()
            # A version tells two sets of weights apart, so there is one change a version at most. What was announced
            # and has not arrived is announced again.
            current = await self.current()
            if (folder != self._seen or self._announced is not None) and version > current:
                self._seen = folder
                await self._give(folder, version)

    async def _give(self, folder: Path, version: int) -> None:
        try:
            self._check(folder)
            self._announced = version
            async with asyncio.timeout(self._deadline_s):
                self._arrived(await self._engine.apply(_manifest(folder, version)))
        except (ModelError, WeightSyncError) as error:
            self._announced = None
            self._warn(f"{self._engine.name} goes on with {self._folder}: {error}")
        except DeadlineError as error:
            # A call to another process has a deadline of its own, which may be the shorter one.
            self._warn(f"{error}; until {self._engine.name} has {folder}, it goes on with {self._folder}")
        except TimeoutError:
            self._warn(
                f"waited {self._deadline_s:g} s for {self._engine.name} to take {folder}; until it has, it goes on "
                f"with {self._folder}; raise run.stall_s if the model is large"
            )

    def _arrived(self, version: int) -> None:
        """The engine says it has this version; what it said before may arrive after."""
        self._version = max(self._version, version)
        if version == self._announced:
            self._announced, self._folder = None, self._seen
            self.num_swaps += 1


def _manifest(folder: Path, version: int) -> WeightManifest:
    """The announcement of a saved model. It is verified by whoever reads it, which knows the model it replaces."""
    return WeightManifest(
        version=version,
        base_version=None,
        kind="full",
        transport=TRANSPORT,
        location=str(folder),
        num_bytes=0,
        digest="",
        slots=(),
    )
