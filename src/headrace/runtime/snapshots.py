"""An engine that follows the policy's weights, a fixed number of versions behind.

In: the manifest of every version that has landed on the engines that sample. Out: the follower has the version
``lag`` behind, and the caller learns which bytes nobody needs any more. Until there are so many versions, it has the
first it was given; so after a resume, too. Its weights are swapped between two of its own passes, and no other engine
is spoken to. The bytes of the versions in between are kept by the trainer's sender: ``lag`` bundles.

A version that the follower cannot take is named to ``warn`` and left out; it goes on with the one it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.errors import DeadlineError, WeightSyncError
from headrace.protocols import Engine
from headrace.types import WeightManifest


class DelayedWeights:
    def __init__(
        self, engine: Engine, *, lag: int, deadline_s: float, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self._engine = engine
        self._lag = lag
        self._deadline_s = deadline_s
        self._warn = warn
        self._held: dict[int, WeightManifest] = {}
        self.version = -1
        """What the follower computes with; -1: it was given nothing yet."""
        self.num_swaps = 0

    async def landed(self, manifest: WeightManifest) -> list[int]:
        """Returns the versions to retire, oldest first."""
        self._held[manifest.version] = manifest
        newest = max(self._held)
        due = [version for version in sorted(self._held) if version <= newest - self._lag]
        if self.version < 0 and not due:
            due = [min(self._held)]
        # Of several that are due only the last would be computed with.
        if due and due[-1] > self.version:
            await self._apply(self._held[due[-1]])
        for version in due:
            del self._held[version]
        return due

    async def _apply(self, manifest: WeightManifest) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                self.version = await self._engine.apply(manifest)
                self.num_swaps += 1
        except TimeoutError:
            self._warn(
                f"{self._engine.name} took over {self._deadline_s:g} s for version {manifest.version} and goes on with "
                f"{self.version}; raise run.stall_s if the model is large"
            )
        except (WeightSyncError, DeadlineError) as error:
            self._warn(f"{self._engine.name} goes on with version {self.version}: {error}")
