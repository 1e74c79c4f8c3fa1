"""Roles without torch for tests of processes: small, exact, and able to fail in every way."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ModelError
from headrace.types import (
    Completion,
    Episode,
    Request,
    RoleStatus,
    StepResult,
    Task,
    TensorBlob,
    TrainBatch,
    WeightManifest,
)
from headrace.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender


def completion(token_ids: Sequence[int], version: int, finish_reason: Any) -> Completion:
    n = len(token_ids)
    return Completion(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.full(n, -0.5, dtype=np.float32),
        versions=np.full(n, version, dtype=np.int32),
        finish_reason=finish_reason,
        kv_versions=np.array([[version, n]], dtype=np.int32),
    )


class ToyEngine:
    """Counts up from the last prompt token; a prompt that starts with 0 runs until aborted."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.name = settings["name"]
        self._version = 0
        self._progress = 0
        self._mode = ""
        self._aborted: dict[str, asyncio.Event] = {}
        self._receiver = SharedMemoryReceiver()
        self.weights: dict[str, np.ndarray] = {}

    async def generate(
        self, request: Request, on_progress: Callable[[Completion], None] | None = None
    ) -> Completion:
        last = int(request.prompt_ids[-1])
        tokens: list[int] = []
        aborted = self._aborted[request.id] = asyncio.Event()
        while len(tokens) < request.sampling.max_tokens:
            tokens.append(last + len(tokens) + 1)
            self._progress += 1
            if on_progress is not None:
                on_progress(completion(tokens, self._version, "abort"))
            if request.prompt_ids[0] == 0:
                await aborted.wait()
            if aborted.is_set():
                return completion(tokens, self._version, "abort")
        return completion(tokens, self._version, "length")

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._aborted:
                self._aborted[request_id].set()

    async def score(
        self, token_ids: Sequence[np.ndarray], *, temperature: float = 1.0, policy: str = "policy"
    ) -> list[np.ndarray]:
        return [(ids * temperature).astype(np.float32) for ids in token_ids]

    async def begin_update(self, mode: str) -> None:
        self._mode = mode

    async def apply(self, manifest: WeightManifest) -> int:
        self.weights = {blob.name: blob.data.copy() for blob in self._receiver.receive(manifest)}
        self._version = manifest.version
        return self._version

    async def cancel_update(self) -> None:
        self._mode = "cancelled"

    async def status(self) -> RoleStatus:
        sums = {name: float(data.sum()) for name, data in self.weights.items()}
        return RoleStatus(
            role=self.name,
            version=self._version,
            progress=self._progress,
            seconds={self._mode: 1.0},
            counters=sums,
        )

    async def close(self) -> None:
        print(f"{self.name} closed", flush=True)


class ToyTrainer:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._sender = SharedMemorySender(Path(settings["directory"]))
        self._version = 0

    async def step(self, batch: TrainBatch) -> StepResult:
        self._version = batch.version + 1
        total = sum(float(sample.behavior_logprobs.sum()) for sample in batch.samples)
        return StepResult(
            step=batch.step,
            version=self._version,
            num_loss_tokens=sum(sample.num_loss_tokens for sample in batch.samples),
            metrics={"logprobs": total},
        )

    async def publish(self, version: int) -> WeightManifest:
        data = np.full(1000, version, dtype=np.uint8)
        return self._sender.send(version, [TensorBlob(name="w", dtype="U8", shape=(1000,), data=data)])

    async def retire(self, version: int) -> None:
        self._sender.retire(version)

    async def save(self, directory: Path) -> None:
        (directory / "version").write_text(str(self._version))

    async def load(self, directory: Path) -> int:
        self._version = int((directory / "version").read_text())
        return self._version

    async def status(self) -> RoleStatus:
        return RoleStatus(role="trainer", version=self._version, progress=self._version, seconds={})

    async def close(self) -> None:
        self._sender.close()


class ToyScorer:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._scale = settings["scale"]

    async def score(self, task: Task, episodes: Sequence[Episode]) -> list[Mapping[str, float | None]]:
        return [
            {"attempt": episode.attempt * self._scale, task.columns["extra"]: None} for episode in episodes
        ]

    async def close(self) -> None:
        pass


async def engine(settings: Mapping[str, Any]) -> ToyEngine:
    return ToyEngine(settings)


def trainer(settings: Mapping[str, Any]) -> ToyTrainer:
    return ToyTrainer(settings)


def scorer(settings: Mapping[str, Any]) -> ToyScorer:
    return ToyScorer(settings)


class FaultyEngine(ToyEngine):
    """Fails in the way its settings name when asked to score."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._fault = settings["fault"]
        self._tasks: list[asyncio.Task[None]] = []

    async def score(
        self, token_ids: Sequence[np.ndarray], *, temperature: float = 1.0, policy: str = "policy"
    ) -> list[np.ndarray]:
        if self._fault == "raise":
            raise ZeroDivisionError("toy fault")
        if self._fault == "exit":
            print("about to leave", file=sys.stderr)
            os._exit(7)
        if self._fault == "background":
            asyncio.get_running_loop().call_soon(self._explode)
        if self._fault == "child":
            sleeper = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
            return [np.array([sleeper.pid])]
        if self._fault == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return await asyncio.get_running_loop().create_future()

    def _explode(self) -> None:
        raise ZeroDivisionError("toy background fault")

    async def close(self) -> None:
        if self._fault == "close":
            raise ZeroDivisionError("toy close fault")
        if self._fault == "hang":
            await asyncio.get_running_loop().create_future()


def faulty(settings: Mapping[str, Any]) -> FaultyEngine:
    return FaultyEngine(settings)


def bad_model(settings: Mapping[str, Any]) -> ToyEngine:
    raise ModelError("model 'toy' has no layers; choose another")


def leaver(settings: Mapping[str, Any]) -> ToyEngine:
    print("leaving while being built", file=sys.stderr)
    os._exit(9)


async def sleeper(settings: Mapping[str, Any]) -> ToyEngine:
    await asyncio.get_running_loop().create_future()
    raise AssertionError
