"""What recording routes costs a mixture of experts while it generates: the same rollouts without and with it.

In: a model shape and a workload. Out: seconds of each side, the median of runs that alternate between two engines in
one process, the overhead as the median of the paired ratios, and the bytes of routes a token has. Both sides have
the same requests, each of which has its length: stop tokens are off.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.table import Table

from headrace.bench.rollout_workload import Workload
from headrace.bench.rollouts import generate
from headrace.bench.shapes import create_random_model
from headrace.engines.make import torch_engine
from headrace.engines.torch_engine import TorchEngine
from headrace.errors import ConfigError
from headrace.models.routers import routers
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger


def run(
    shape: str,
    *,
    workload: Workload | None = None,
    repeats: int = 5,
    device: str = "cuda",
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All figures as plain numbers."""
    workload = workload or Workload()
    num_requests = workload.at_once
    num_tokens = workload.num_tokens
    engines: dict[str, TorchEngine] = {}
    for side in ("live", "keep"):
        model = create_random_model(shape, device=device)
        if not routers(model):
            raise ConfigError(f"--routes: shape {shape} has no experts; use moe-small")
        engines[side] = torch_engine(
            model,
            ledger=TimeLedger(ENGINE_ACTIVITIES),
            max_running=num_requests,
            # Room for every request at its full length, so that neither side ever computes anything twice.
            kv_tokens=num_tokens + num_requests * (workload.prompt_tokens + 16),
            record_routes=side == "keep",
            progress=progress,
        )
    vocab_size = int(model.config.vocab_size)
    return {"shape": shape, "tokens": num_tokens} | _compare(engines, workload, vocab_size, repeats, progress)


def _compare(
    engines: Mapping[str, TorchEngine],
    workload: Workload,
    vocab_size: int,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {side: [] for side in engines}
    route_bytes = 0.0
    for repeat in range(repeats + 1):
        # The first run of each warms it up; after that each side goes first as often as the other.
        for side in list(engines) if repeat % 2 else list(engines)[::-1]:
            taken, done = generate(engines[side], workload, vocab_size, repeat)
            if repeat:
                seconds[side].append(taken)
            records = [completion.routing for completion in done if completion.routing is not None]
            if records:
                rows = sum(len(record.experts) for record in records)
                route_bytes = sum(record.experts.nbytes for record in records) / rows
        progress(f"routes {repeat}/{repeats}")
    ratios = [keep / live for live, keep in zip(seconds["live"], seconds["keep"], strict=True)]
    return {
        **{
            side: {"seconds": statistics.median(all_s), "all_seconds": all_s}
            for side, all_s in seconds.items()
        },
        "overhead": statistics.median(ratios) - 1,
        "overheads": [ratio - 1 for ratio in ratios],
        "route_bytes_per_token": route_bytes,
    }


def table(figures: Mapping[str, Any]) -> Table:
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    title = (
        f"{figures['shape']}, {figures['tokens']:,} output tokens, {figures['route_bytes_per_token']:.0f} bytes of "
        f"routes a token, {place}"
    )
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("routes", "seconds", "tokens/s", "overhead"):
        drawn.add_column(name, justify="right")
    for side, name in (("live", "not recorded"), ("keep", "recorded")):
        seconds = figures[side]["seconds"]
        overhead = f"{figures['overhead']:+.1%}" if side == "keep" else ""
        drawn.add_row(name, f"{seconds:.2f}", f"{figures['tokens'] / seconds:,.0f}", overhead)
    return drawn
