"""How long decoding stalls when new weights land, on one GPU.

In: a model shape. Out: the longest gap between two passes of a running engine while updates arrive from another
process, beside the usual gap, and the seconds each side of the transfer took.
"""

from __future__ import annotations

import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np
import torch
from rich.table import Table

from headrace.bench.shapes import create_random_model
from headrace.engines.make import torch_engine
from headrace.engines.torch_engine import TorchEngine
from headrace.errors import DeadlineError, RoleError
from headrace.models.tensors import to_blobs
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import Request, Sampling, WeightManifest
from headrace.weights.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from headrace.wire import decode, encode

_DEADLINE_S = 300


def run(
    shape: str = "qwen2-1.5b",
    *,
    num_running: int = 64,
    updates: int = 5,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All figures as plain numbers, in milliseconds."""
    model = create_random_model(shape)
    engine = torch_engine(
        model,
        ledger=TimeLedger(ENGINE_ACTIVITIES),
        max_running=num_running,
        memory_share=0.4,
        progress=progress,
    )
    sender = subprocess.Popen(
        [sys.executable, "-m", __name__, shape, str(updates)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        figures = _measure(engine, sender, num_running, updates, model.config.vocab_size)
    finally:
        sender.kill()
        sender.wait(timeout=_DEADLINE_S)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"shape": shape, "num_running": num_running, "weight_bytes": num_bytes, **figures}


def table(figures: Mapping[str, Any]) -> Table:
    title = f"{figures['shape']}, {figures['weight_bytes'] / 1e9:.2f} GB of weights, milliseconds"
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    names = ("usual_pass_ms", "stall_ms", "worst_stall_ms", "apply_ms", "publish_ms")
    for name in names:
        drawn.add_column(name.removesuffix("_ms").replace("_", " "), justify="right")
    drawn.add_row(*(f"{figures[name]:.2f}" for name in names))
    return drawn


def _measure(
    engine: TorchEngine, sender: subprocess.Popen[bytes], num_running: int, updates: int, vocab_size: int
) -> dict[str, Any]:
    assert sender.stdin is not None and sender.stdout is not None
    receiver = CudaIpcReceiver()
    _keep_busy(engine, num_running, vocab_size, round_number=0)
    usual = _gaps(engine, 60)
    stalls, applies, publishes = [], [], []
    for update in range(updates + 1):
        sender.stdin.write(b"go\n")
        sender.stdin.flush()
        publish_ms, frame = _line(sender.stdout).split()
        manifest: WeightManifest = decode(bytes.fromhex(frame.decode()))
        _keep_busy(engine, num_running, vocab_size, round_number=update + 1)
        _gaps(engine, 10)
        # Verified beside decoding in a run (engines/driver.py), so it is not part of the stall.
        blobs = list(receiver.receive(manifest))
        _gaps(engine, 2)
        before = time.perf_counter()
        engine.apply(manifest.version, blobs)
        applied = time.perf_counter()
        after = _gaps(engine, 10)
        # The first update also opens the memory, once for a run.
        if update:
            stalls.append((applied - before) * 1e3 + max(after) - statistics.median(usual))
            applies.append((applied - before) * 1e3)
            publishes.append(float(publish_ms))
    receiver.close()
    return {
        "usual_pass_ms": statistics.median(usual),
        "stall_ms": statistics.median(stalls),
        "worst_stall_ms": max(stalls),
        "apply_ms": statistics.median(applies),
        "publish_ms": statistics.median(publishes),
    }


def _line(answers: IO[bytes]) -> bytes:
    """The other process answers each order with one line."""
    if not select.select([answers], [], [], _DEADLINE_S)[0]:
        raise DeadlineError(f"waited {_DEADLINE_S} s for the other process to publish its weights")
    if not (line := answers.readline()):
        raise RoleError("the process that publishes weights has ended; its error is above")
    return line


def _keep_busy(engine: TorchEngine, num_running: int, vocab_size: int, round_number: int) -> None:
    """Fill the engine up, past its prompts."""
    rng = np.random.default_rng(round_number)
    for i in range(num_running - engine.num_started):
        prompt = rng.integers(0, vocab_size, 64).astype(np.int32)
        name = f"{round_number}-{i}"
        engine.submit(Request(id=name, prompt_ids=prompt, sampling=Sampling(max_tokens=1500), seed=i))
    _gaps(engine, 8)


def _gaps(engine: TorchEngine, count: int) -> list[float]:
    """Milliseconds between the ends of so many passes."""
    gaps, last = [], time.perf_counter()
    for _ in range(count):
        engine.step()
        now = time.perf_counter()
        gaps.append((now - last) * 1e3)
        last = now
    return gaps


def _send(shape: str, updates: int) -> None:
    """The other process: publishes the weights of its own model when told to."""
    model, sender = create_random_model(shape, seed=1), CudaIpcSender()
    for version in range(1, updates + 2):
        sys.stdin.readline()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.001)
        torch.cuda.synchronize()
        start = time.perf_counter()
        manifest = sender.send(version, to_blobs(model))
        taken = (time.perf_counter() - start) * 1e3
        print(taken, encode(manifest).hex(), flush=True)
        sender.retire(version - 2)
    sys.stdin.read()


if __name__ == "__main__":
    _send(sys.argv[1], int(sys.argv[2]))
