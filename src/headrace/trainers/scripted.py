"""A trainer whose weights are the account of what it was trained on: no torch. The public fake.

Its only parameter is a table of counts: how often each (group, attempt) was trained, in order of first
use. Checkpoints and published bundles carry that table, so a test can read from restored weights
whether an attempt was lost or counted twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.errors import CheckpointError
from headrace.protocols import WeightSender
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.types import BundleKind, RoleStatus, StepResult, TensorBlob, TrainBatch, WeightManifest

FILE = "counts.json"


class ScriptedTrainer:
    def __init__(self, *, sender: WeightSender | None = None, token_s: float = 0.001) -> None:
        """``sender`` None: a publication is only its version."""
        self._sender = sender
        self._token_s = token_s
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        # One call at a time, as a trainer with one device has it; only ``status`` answers meanwhile.
        self._busy = asyncio.Lock()
        self._ledger = TimeLedger(TRAINER_ACTIVITIES, start="waiting-for-batch", clock=self._clock)
        self._version = 0
        self._num_tokens = 0
        self.counts: dict[str, int] = {}
        """``group/attempt`` -> times trained."""
        self.lags: list[int] = []
        """Largest lag of each step trained by this object."""

    async def step(self, batch: TrainBatch) -> StepResult:
        num_tokens = sum(sample.num_loss_tokens for sample in batch.samples)
        async with self._busy:
            with self._ledger.activity("forward-backward"):
                await asyncio.sleep(self._token_s * num_tokens)
        for sample in batch.samples:
            key = f"{sample.group}/{sample.attempt}"
            self.counts[key] = self.counts.get(key, 0) + 1
        self.lags.append(max(batch.version - int(s.versions[s.loss_mask].min()) for s in batch.samples))
        self._version = batch.version + 1
        self._num_tokens += num_tokens
        return StepResult(step=batch.step, version=self._version, num_loss_tokens=num_tokens)

    async def publish(self, version: int) -> WeightManifest:
        return self._send(version, None)

    async def publish_whole(self) -> WeightManifest:
        async with self._busy:
            return self._send(self._version, "full")

    def _send(self, version: int, kind: BundleKind | None) -> WeightManifest:
        if self._sender is not None:
            data = np.frombuffer(json.dumps(self.counts).encode(), np.uint8)
            blob = TensorBlob(name="counts", dtype="U8", shape=(data.size,), data=data)
            return self._sender.send(version, [blob], kind=kind)
        return WeightManifest(
            version=version,
            base_version=None,
            kind="full",
            transport="none",
            location="",
            num_bytes=0,
            digest="",
            slots=(),
        )

    async def retire(self, version: int) -> None:
        async with self._busy:
            if self._sender is not None:
                self._sender.retire(version)

    async def save(self, directory: Path) -> None:
        with self._ledger.activity("checkpoint"):
            text = json.dumps({"version": self._version, "counts": self.counts})
            (directory / FILE).write_text(text)

    async def load(self, directory: Path) -> int:
        try:
            saved = json.loads((directory / FILE).read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{directory} has no {FILE}; another kind of trainer wrote it") from None
        self._version, self.counts = saved["version"], saved["counts"]
        return self._version

    async def status(self) -> RoleStatus:
        return RoleStatus(
            role="trainer",
            version=self._version,
            progress=self._num_tokens,
            seconds=self._ledger.seconds(),
        )

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
