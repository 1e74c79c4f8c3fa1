"""A long run of the engine on a GPU under pressure: does anything leak?

In: minutes, and a model shape. Out: GPU memory and free blocks at the start and the end of a run in which requests
of mixed lengths come and go, some are aborted and resumed, weights change all along, and the pool is too small
for what runs. Every token must bear a version that was current while its request ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headrace.bench.shapes import create_random_model
from headrace.engines.make import torch_engine
from headrace.engines.torch_engine import TorchEngine
from headrace.errors import InvariantError
from headrace.models.tensors import to_blobs
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import Completion, Request, Sampling

_RUNNING = 256
_STEPS_A_ROUND = 200


def run(
    shape: str = "qwen2-0.5b",
    *,
    minutes: float = 8.0,
    kv_tokens: int = 60_000,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Figures as plain numbers; raises InvariantError when something is lost or grows."""
    model = create_random_model(shape)
    engine = torch_engine(
        model,
        ledger=TimeLedger(ENGINE_ACTIVITIES),
        max_running=_RUNNING,
        kv_tokens=kv_tokens,
        progress=progress,
    )
    traffic = _Traffic(engine, int(model.config.vocab_size))
    blobs = [list(to_blobs(create_random_model(shape, seed=seed))) for seed in (1, 2)]
    idle_blocks = engine.counters()["free_blocks"]
    traffic.round(_STEPS_A_ROUND)
    at_start, begun, version = torch.cuda.memory_allocated(), time.monotonic(), 0
    while time.monotonic() - begun < 60 * minutes:
        version += 1
        engine.apply(version, blobs[version % 2])
        traffic.round(_STEPS_A_ROUND)
        progress(
            f"{(time.monotonic() - begun) / 60:.1f} min, version {version}, {traffic.num_finished} finished, "
            f"{engine.counters()['preemptions']:.0f} preemptions"
        )
    at_end = torch.cuda.memory_allocated()
    traffic.drain()
    counters = engine.counters()
    if counters["free_blocks"] != idle_blocks:
        raise InvariantError(f"{idle_blocks - counters['free_blocks']:.0f} blocks were lost")
    if at_end > at_start + 2**20:
        raise InvariantError(f"GPU memory grew by {at_end - at_start} bytes")
    return {
        "shape": shape,
        "minutes": (time.monotonic() - begun) / 60,
        "versions": version,
        "finished": traffic.num_finished,
        "resumed": traffic.num_resumed,
        "preemptions": counters["preemptions"],
        "bytes_at_start": at_start,
        "bytes_at_end": at_end,
        "free_blocks": counters["free_blocks"],
    }


class _Traffic:
    """Keeps the engine full, aborts a few requests now and then and sends them again from their prefix."""

    def __init__(self, engine: TorchEngine, vocab_size: int) -> None:
        self.num_finished = self.num_resumed = 0
        self._engine = engine
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(0)
        self._live: dict[str, Request] = {}
        self._num_sent = 0

    def round(self, steps: int) -> None:
        for step in range(steps):
            while len(self._live) < _RUNNING + 32:
                self._send()
            if step % 50 == 25:
                self._interrupt()
            self._take(self._engine.step())

    def drain(self) -> None:
        while self._engine.has_work:
            self._take(self._engine.step())
        if self._live:
            raise InvariantError(f"{len(self._live)} requests never came back")

    def _send(self) -> None:
        length = int(np.clip(np.exp(self._rng.normal(4.5, 1.0)), 1, 1500))
        request = Request(
            id=str(self._num_sent),
            prompt_ids=self._rng.integers(0, self._vocab_size, self._rng.integers(1, 400)).astype(np.int32),
            sampling=Sampling(max_tokens=length),
            seed=self._num_sent,
        )
        self._num_sent += 1
        self._live[request.id] = request
        self._engine.submit(request)

    def _interrupt(self) -> None:
        chosen = [str(name) for name in self._rng.choice(list(self._live), 8, replace=False)]
        for name, part in self._engine.abort(chosen):
            old = self._live.pop(name)
            request = Request(
                id=f"{name}r", prompt_ids=old.prompt_ids, sampling=old.sampling, seed=old.seed, prefix=part
            )
            self._live[request.id] = request
            self._engine.submit(request)
            self.num_resumed += 1

    def _take(self, done: list[tuple[str, Completion]]) -> None:
        for name, completion in done:
            request = self._live.pop(name)
            self.num_finished += 1
            if completion.num_tokens != request.sampling.max_tokens:
                raise InvariantError(
                    f"request {name} has {completion.num_tokens} of {request.sampling.max_tokens} tokens"
                )
            if (np.diff(completion.versions) < 0).any() or completion.versions[-1] > self._engine.version:
                raise InvariantError(f"request {name} bears versions out of order: {completion.versions}")
