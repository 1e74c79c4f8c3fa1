"""What serving adapters costs: decoding with them, and a new one landing.

In: a model shape (on a CPU a tiny model), how many adapters of which rank. Out: milliseconds of a decode pass without
adapters, with one and with all in every pass, the bytes an adapter sends beside its own, and how long publishing,
verifying and applying one takes while requests run. Sender and engine are in one process, so the way is the
transport's own, without another process beside it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import PreTrainedModel

from headrace.bench.shapes import create_random_model
from headrace.engines.make import torch_engine
from headrace.engines.torch_engine import TorchEngine
from headrace.models.loading import make_tiny_model
from headrace.models.lora import LoraSpec
from headrace.protocols import WeightSender
from headrace.timekeeping import ENGINE_ACTIVITIES, TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import Request, Sampling
from headrace.weights.shared_memory import SharedMemorySender
from headrace.weights.transports import TransportReceiver

_TIMED_PASSES = 60
_CONTEXT = 2048


def run(
    shape: str | None = None,
    *,
    rank: int = 16,
    num_adapters: int = 4,
    num_running: int = 64,
    updates: int = 8,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """``shape`` None: a tiny model on the CPU."""
    spec = LoraSpec(rank=rank, alpha=2.0 * rank)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as made:
        figures: dict[str, Any] = {"shape": shape or "tiny", "rank": rank, "num_running": num_running}
        figures["plain_pass_ms"] = _plain_pass(_model(shape, made), num_running, progress)
        passes, sync = _with_adapters(shape, Path(made), spec, num_adapters, num_running, updates, progress)
        return figures | passes | sync


def table(figures: Mapping[str, Any]) -> Table:
    title = f"{figures['shape']}, adapters of rank {figures['rank']}, {figures['num_running']} requests"
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, value in figures.items():
        if name not in ("shape", "rank", "num_running"):
            drawn.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    return drawn


def _model(shape: str | None, directory: str | Path, seed: int = 0) -> PreTrainedModel:
    if shape is not None:
        return create_random_model(shape, seed=seed)
    return make_tiny_model(directory, vocab_size=61, hidden_size=192, num_layers=2, context_tokens=_CONTEXT)


def _engine(model: PreTrainedModel, num_running: int, **settings: Any) -> TorchEngine:
    ledger = TimeLedger(ENGINE_ACTIVITIES)
    return torch_engine(model, ledger=ledger, max_running=num_running, memory_share=0.4, **settings)


def _plain_pass(model: PreTrainedModel, num_running: int, progress: Callable[[str], None]) -> float:
    engine = _engine(model, num_running, progress=progress)
    _keep_busy(engine, ["policy"], num_running, model.config.vocab_size, 0)
    return statistics.median(_gaps(engine, _TIMED_PASSES))


def _with_adapters(
    shape: str | None,
    directory: Path,
    spec: LoraSpec,
    num_adapters: int,
    num_running: int,
    updates: int,
    progress: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    model = _model(shape, directory)
    vocab_size = model.config.vocab_size
    engine = _engine(model, num_running, lora=spec, num_adapters=num_adapters, progress=progress)
    trainer = TorchTrainer(
        _model(shape, directory),
        sender=_sender(model.device.type, directory),
        ledger=TimeLedger(TRAINER_ACTIVITIES),
        lora=spec,
        compute_dtype="bf16" if model.dtype == torch.bfloat16 else "fp32",
        eager=True,
    )
    receiver, names = TransportReceiver(), [f"policy-{i}" for i in range(num_adapters)]
    for name in names:
        engine.apply_adapter(name, 0, list(receiver.receive(trainer.publish(0))))
    passes: dict[str, float] = {}
    for label, policies in (("one_adapter_pass_ms", names[:1]), ("all_adapters_pass_ms", names)):
        engine.abort(engine.started_ids())
        _keep_busy(engine, policies, num_running, vocab_size, len(passes) + 1)
        passes[label] = statistics.median(_gaps(engine, _TIMED_PASSES))
    usual, times = passes["all_adapters_pass_ms"], []
    for update in range(updates):
        progress(f"update {update + 1}/{updates}")
        _keep_busy(engine, names, num_running, vocab_size, update + 9)
        times.append(_update(engine, trainer, receiver, names[0], update + 1, usual))
    own = sum(model.dtype.itemsize * p.numel() for p in trainer.model.parameters())
    sent = trainer.publish(0).num_bytes
    receiver.close()
    trainer.close()
    medians = {key: statistics.median(t[key] for t in times[1:]) for key in times[0]}
    return passes, {"adapter_bytes": own, "sent_bytes": sent, "sent_beside_own": sent / own - 1, **medians}


def _update(
    engine: TorchEngine,
    trainer: TorchTrainer,
    receiver: TransportReceiver,
    policy: str,
    version: int,
    usual_ms: float,
) -> dict[str, float]:
    # The one before has landed, and its memory is used again.
    trainer.retire(0)
    start = time.perf_counter()
    manifest = trainer.publish(0)
    published = time.perf_counter()
    # Verified beside decoding in a run (engines/driver.py), so it is not part of the stall.
    blobs = list(receiver.receive(manifest))
    received = time.perf_counter()
    _gaps(engine, 4)
    before = time.perf_counter()
    engine.apply_adapter(policy, version, blobs)
    applied = time.perf_counter()
    stall_ms = (applied - before) * 1e3 + max(_gaps(engine, 6)) - usual_ms
    return {
        "publish_ms": (published - start) * 1e3,
        "receive_ms": (received - published) * 1e3,
        "apply_ms": (applied - before) * 1e3,
        "stall_ms": stall_ms,
    }


def _sender(device_kind: str, directory: Path) -> WeightSender:
    if device_kind == "cuda":
        from headrace.weights.cuda_ipc import CudaIpcSender

        return CudaIpcSender()
    return SharedMemorySender(directory / "weights")


def _keep_busy(engine: TorchEngine, policies: list[str], count: int, vocab_size: int, number: int) -> None:
    """Fill the engine up, past its prompts."""
    rng = np.random.default_rng(number)
    for i in range(count - engine.num_started):
        engine.submit(
            Request(
                id=f"{number}-{i}",
                prompt_ids=rng.integers(0, vocab_size, 64).astype(np.int32),
                sampling=Sampling(max_tokens=1500),
                seed=i,
                policy=policies[i % len(policies)],
            )
        )
    _gaps(engine, 12)


def _gaps(engine: TorchEngine, count: int) -> list[float]:
    """Milliseconds between the ends of so many passes."""
    gaps, last = [], time.perf_counter()
    for _ in range(count):
        engine.step()
        now = time.perf_counter()
        gaps.append((now - last) * 1e3)
        last = now
    return gaps
