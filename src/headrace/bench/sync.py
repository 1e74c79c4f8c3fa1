"""What new weights cost: bytes, seconds on either side, and how long decoding stalls when they land.

In: a model shape. Out: figures for every bundle and transport that this machine has, beside the machine's own copy
bandwidth. Weights come from another process, which moves them between two versions: all of them, or by a step of Adam
at learning rate 1e-6 where deltas are sent, or those of an adapter. The engine decodes all the while; in a run bundles
are read and verified beside decoding (engines/driver.py), so only applying them is part of the stall.
"""

from __future__ import annotations

import importlib.util
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from rich.table import Table

from headrace.bench import delta_size
from headrace.bench.shapes import create_random_model
from headrace.engines.make import torch_engine
from headrace.engines.torch_engine import TorchEngine
from headrace.errors import DeadlineError, RoleError
from headrace.models.lora import LoraSpec
from headrace.models.tensors import named_tensors, to_blobs
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import Request, Sampling, TensorBlob, WeightManifest
from headrace.weights.segment_directory import create_segment_directory
from headrace.weights.transports import Route, TransportReceiver, weight_sender
from headrace.wire import decode, encode

_DEADLINE_S = 300
_CELLS = {
    "cpu": [
        (bundle, way)
        for bundle in ("full", "delta", "adapter")
        for way in ("shared_memory", "files", "collective")
    ],
    "cuda": [("full", "cuda_ipc"), ("full", "shared_memory"), ("delta", "files"), ("adapter", "cuda_ipc")],
}
_ADAPTER = LoraSpec(rank=16, alpha=32.0)
_RUNNING = {"cpu": 4, "cuda": 64}

_Source = tuple[int, Iterator[float], Callable[[], Iterable[TensorBlob]]]
"""Bytes of what is published, its moves from version to version, and its tensors."""


def run(
    shape: str,
    *,
    device: str,
    cells: Sequence[tuple[str, str]] | None = None,
    updates: int = 5,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All figures as plain numbers. ``cells`` are pairs of bundle and transport; None: what the device has."""
    figures: dict[str, Any] = {
        "shape": shape,
        "num_running": _RUNNING[device],
        "delta_after_adam": delta_size.run(),
        "cells": [],
    }
    # An engine serves a model that changes, or adapters of one that does not.
    for lora in (None, _ADAPTER):
        chosen = [
            cell for cell in cells or _cells_here(device, progress) if _is_adapter(cell) == (lora is not None)
        ]
        if chosen:
            measured = _on_one_engine(shape, device, lora, chosen, updates, progress)
            figures["cells"] += measured.pop("cells")
            figures = measured | figures
    return figures


def _cells_here(device: str, progress: Callable[[str], None]) -> list[tuple[str, str]]:
    if importlib.util.find_spec("peft") is not None:
        return _CELLS[device]
    progress("adapters are left out, since peft (Headrace's extra lora) is not installed")
    return [cell for cell in _CELLS[device] if not _is_adapter(cell)]


def _is_adapter(cell: tuple[str, str]) -> bool:
    return cell[0] == "adapter"


def _on_one_engine(
    shape: str,
    device: str,
    lora: LoraSpec | None,
    cells: Sequence[tuple[str, str]],
    updates: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    model = create_random_model(shape, device=device)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in named_tensors(model).values())
    engine = torch_engine(
        model,
        ledger=TimeLedger(ENGINE_ACTIVITIES),
        max_running=_RUNNING[device],
        memory_share=0.4,
        progress=progress,
        lora=lora,
    )
    busy = _Busy(engine, _RUNNING[device], model.config.vocab_size)
    figures: dict[str, Any] = {
        "weight_bytes": num_bytes,
        "copy_gb_s": copy_bandwidth(min(num_bytes, 1 << 30), device) / 1e9,
        "cells": [],
    }
    for bundle, transport in cells:
        progress(f"{bundle} bundles by {transport}")
        with _Sender(shape, device, bundle, transport, updates) as sender:
            cell = _measure(busy, sender, updates)
        rates = {f"{leg}_gb_s": cell["own_bytes"] / cell[f"{leg}_ms"] / 1e6 for leg in ("publish", "receive")}
        figures["cells"].append({"bundle": bundle, "transport": transport, **cell, **rates})
        figures.setdefault("usual_pass_ms", cell["usual_pass_ms"])
    return figures


def table(figures: Mapping[str, Any]) -> Table:
    size = figures["delta_after_adam"]
    title = (
        f"{figures['shape']}, {figures['weight_bytes'] / 1e9:.2f} GB of weights; this machine copies "
        f"{figures['copy_gb_s']:.1f} GB/s; a pass takes {figures['usual_pass_ms']:.1f} ms\n"
        f"delta after {size['steps']} Adam steps: {size['bytes_share']:.2%} of the bytes, {size['changed_share']:.2%} "
        f"of the weights changed; of one step: {size['one_step_bytes_share']:.2%}, "
        f"{size['one_step_changed_share']:.2%}\ntimes in ms; GB/s are the weights' own bytes over them, sent or not; "
        "a copy reads and writes each byte"
    )

    def rate(gb_s: float) -> str:
        return f"{gb_s:.1f} {gb_s / figures['copy_gb_s']:.0%}"

    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    columns = (
        "bundle",
        "transport",
        "MB",
        "of own",
        "moved",
        "publish",
        "GB/s, of copy",
        "receive",
        "GB/s, of copy",
        "stall",
        "worst",
    )
    for column in columns:
        left = column in ("bundle", "transport")
        drawn.add_column(column, justify="left" if left else "right", overflow="fold")
    for cell in figures["cells"]:
        drawn.add_row(
            cell["bundle"],
            cell["transport"],
            f"{cell['sent_bytes'] / 1e6:.1f}",
            f"{cell['sent_bytes'] / cell['own_bytes']:.2%}",
            f"{cell['changed_share']:.1%}",
            f"{cell['publish_ms']:.1f}",
            rate(cell["publish_gb_s"]),
            f"{cell['receive_ms']:.1f}",
            rate(cell["receive_gb_s"]),
            f"{cell['stall_ms']:.1f}",
            f"{cell['worst_stall_ms']:.1f}",
        )
    return drawn


def copy_bandwidth(num_bytes: int, device: str) -> float:
    """Bytes a second of a plain copy within this device's memory, by one thread."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    taken = []
    for _ in range(7):
        start = time.perf_counter()
        if device == "cpu":
            np.copyto(target.numpy(), source.numpy())
        else:
            target.copy_(source)
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return num_bytes / statistics.median(taken)


class _Busy:
    """An engine that decodes all the time."""

    def __init__(self, engine: TorchEngine, num_running: int, vocab_size: int) -> None:
        self.engine = engine
        self._num_running = num_running
        self._vocab_size = vocab_size
        self._num_submitted = 0

    def fill(self) -> None:
        """Fill the engine up, past its prompts."""
        rng = np.random.default_rng(self._num_submitted)
        for _ in range(self._num_running - self.engine.num_started):
            self._num_submitted += 1
            prompt = rng.integers(0, self._vocab_size, 64).astype(np.int32)
            sampling = Sampling(max_tokens=1500)
            self.engine.submit(
                Request(
                    id=str(self._num_submitted),
                    prompt_ids=prompt,
                    sampling=sampling,
                    seed=self._num_submitted,
                )
            )
        self.gaps(8)

    def gaps(self, count: int) -> list[float]:
        """Milliseconds between the ends of so many passes."""
        gaps, last = [], time.perf_counter()
        for _ in range(count):
            self.engine.step()
            now = time.perf_counter()
            gaps.append((now - last) * 1e3)
            last = now
        return gaps


class _Sender:
    """The process that publishes weights when told to."""

    def __init__(self, shape: str, device: str, bundle: str, transport: str, updates: int) -> None:
        self._command = [sys.executable, "-m", __name__, shape, device, bundle, transport, str(updates)]

    def __enter__(self) -> _Sender:
        self._segments = create_segment_directory()
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
        self._process = subprocess.Popen(
            [*self._command, str(self._segments), str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(timeout=_DEADLINE_S)
        for place in (self._segments, self._folder):
            shutil.rmtree(place, ignore_errors=True)

    def publish(self) -> tuple[float, float, int, WeightManifest]:
        """Milliseconds, the share of weights that changed, the bytes of all that may, and the announcement."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()
        taken_ms, changed, own_bytes, frame = _line(self._process.stdout).split()
        return float(taken_ms), float(changed), int(own_bytes), decode(bytes.fromhex(frame.decode()))


def _measure(busy: _Busy, sender: _Sender, updates: int) -> dict[str, float]:
    receiver, engine = TransportReceiver(), busy.engine
    seen: list[dict[str, float]] = []
    usual_ms = 0.0
    for update in range(updates + 1):
        publish_ms, changed, own_bytes, manifest = sender.publish()
        if update:
            busy.fill()
        start = time.perf_counter()
        updated = list(receiver.receive(manifest, _base(engine, manifest)))
        receive_ms = (time.perf_counter() - start) * 1e3
        if update:
            busy.gaps(2)
        start = time.perf_counter()
        _apply(engine, manifest, updated)
        apply_ms = (time.perf_counter() - start) * 1e3
        if not update:
            # The first update is always full and also opens the memory, once for a run; an adapter is served after it.
            busy.fill()
            usual_ms = statistics.median(busy.gaps(20))
            continue
        seen.append(
            {
                "sent_bytes": manifest.num_bytes,
                "own_bytes": own_bytes,
                "changed_share": changed,
                "publish_ms": publish_ms,
                "receive_ms": receive_ms,
                "apply_ms": apply_ms,
                "stall_ms": apply_ms + max(0.0, max(busy.gaps(5)) - usual_ms),
            }
        )
        del updated
    receiver.close()
    medians = {name: statistics.median(one[name] for one in seen) for name in seen[0]}
    worst_ms = max(one["stall_ms"] for one in seen)
    return {**medians, "worst_stall_ms": worst_ms, "usual_pass_ms": usual_ms}


def _base(engine: TorchEngine, manifest: WeightManifest) -> Iterable[TensorBlob]:
    """What a delta builds on."""
    return engine.weights(slot.name for slot in manifest.slots) if manifest.kind != "adapter" else ()


def _apply(engine: TorchEngine, manifest: WeightManifest, updated: Sequence[Any]) -> None:
    if manifest.kind == "adapter":
        engine.apply_adapter(manifest.policy, manifest.version, updated)
    else:
        engine.apply(manifest.version, updated)


def _line(answers: IO[bytes]) -> bytes:
    """The other process answers each order with one line."""
    if not select.select([answers], [], [], _DEADLINE_S)[0]:
        raise DeadlineError(f"waited {_DEADLINE_S} s for the other process to publish its weights")
    if not (line := answers.readline()):
        raise RoleError("the process that publishes weights has ended; its error is above")
    return line


def _send(
    shape: str, device: str, bundle: str, transport: str, updates: int, segments: Path, folder: Path
) -> None:
    """The other process: publishes the weights of its own model, or of an adapter, when told to."""
    source = _adapter_source if bundle == "adapter" else _model_source
    own_bytes, moves, blobs = source(create_random_model(shape, device=device, seed=1), bundle)
    route = Route(transport=transport, why="", bundle=bundle)  # type: ignore[arg-type]
    sender = weight_sender(route, segments=segments, folder=folder)
    for version in range(1, updates + 2):
        sys.stdin.readline()
        # An order means that the version before has landed; a run retires it then, ahead of the next.
        sender.retire(version - 1)
        changed = next(moves)
        _finish(device)
        start = time.perf_counter()
        manifest = sender.send(version, blobs(), kind="adapter" if bundle == "adapter" else None)
        taken_ms = (time.perf_counter() - start) * 1e3
        print(taken_ms, changed, own_bytes, encode(manifest).hex(), flush=True)
    sys.stdin.read()


def _model_source(model: Any, bundle: str) -> _Source:
    weights = list(named_tensors(model).values())
    moves = _adam_moves(weights) if bundle == "delta" else _all_moves(weights)
    # Once, as the trainer does it.
    blobs = list(to_blobs(model))
    return sum(blob.data.nbytes for blob in blobs), moves, lambda: blobs


def _adapter_source(model: Any, bundle: str) -> _Source:
    from headrace.trainers.adapter_weights import AdapterWeights

    adapter = AdapterWeights(model, model.dtype, _ADAPTER)
    masters = list(adapter.model.parameters())
    with torch.no_grad():
        for master in masters:
            master.normal_(std=0.02)

    def moves() -> Iterator[float]:
        for changed in _all_moves(masters):
            adapter.refresh()
            yield changed

    return sum(master.numel() for master in masters) * model.dtype.itemsize, moves(), adapter.blobs


def _all_moves(weights: Sequence[torch.Tensor]) -> Iterator[float]:
    """Change every weight; yields the share that changed."""
    while True:
        with torch.no_grad():
            torch._foreach_mul_(list(weights), 1.01)
        yield 1.0


def _adam_moves(weights: Sequence[torch.Tensor]) -> Iterator[float]:
    """A step of Adam on float32 masters of the weights; yields the share that changed."""
    masters = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-6, weight_decay=0.0)
    num_weights = sum(weight.numel() for weight in weights)
    while True:
        for master in masters:
            master.grad = torch.randn_like(master)
        optimizer.step()
        num_changed = 0
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                moved = master.to(weight.dtype)
                num_changed += int((moved != weight).sum())
                weight.copy_(moved)
        yield num_changed / num_weights


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    _shape, _device, _bundle, _transport, _updates, _segments, _folder = sys.argv[1:]
    _send(_shape, _device, _bundle, _transport, int(_updates), Path(_segments), Path(_folder))
