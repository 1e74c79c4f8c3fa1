"""Rollouts on one GPU: groups of samples with long-tailed lengths, and how far from the memory's limit they run.

In: a model shape, a workload and a number of repeats. Out: seconds (median, after a warm-up) and output tokens per
second, beside the seconds that reading the weights once a decode step and every visible key and value once, prompts
once a group, would take at the bandwidth measured in the same run. Stop tokens are off: each request has its length.
With several rounds there are more samples than run at once, as in asynchronous training; with several turns each
comes back with tokens it did not write, as agents do. Either way prompts are computed beside decoding rows.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import PreTrainedModel

from headrace.bench import against_vllm, peers, train
from headrace.bench.rates import copy_bandwidth
from headrace.bench.rollout_workload import Workload
from headrace.bench.shapes import create_random_model
from headrace.engines.make import torch_engine
from headrace.engines.torch_engine import TorchEngine
from headrace.errors import ConfigError
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import Completion


def run(
    shape: str,
    *,
    workload: Workload | None = None,
    repeats: int = 3,
    compiled: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All figures as plain numbers."""
    workload = workload or Workload()
    model = create_random_model(shape)
    engine = torch_engine(
        model, ledger=TimeLedger(ENGINE_ACTIVITIES), max_running=workload.at_once,
        compiled=compiled, progress=progress,
    )  # fmt: skip
    warm = Workload(num_prompts=2, group_size=4, mean_tokens=4, cap_tokens=8, seed=9)
    vocab_size = int(model.config.vocab_size)
    generate(engine, warm, vocab_size, repeat=9)
    ready_s = peers.process_age_s()
    seconds = []
    for repeat in range(repeats + 1):
        taken, _ = generate(engine, workload, vocab_size, repeat)
        if repeat:
            seconds.append(taken)
        progress(f"rollouts {repeat}/{repeats}: {taken:.2f} s")
    num_tokens = workload.num_tokens
    bandwidth = copy_bandwidth()
    limit_s = limit_seconds(model, workload, bandwidth)
    median = statistics.median(seconds)
    return {
        "shape": shape,
        "rounds": workload.rounds,
        "turns": workload.turns,
        "seconds": median,
        "all_seconds": seconds,
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / median,
        "limit_s": limit_s,
        "fraction_of_limit": limit_s / median,
        "bandwidth_bytes_per_s": bandwidth,
        "ready_s": ready_s,
        "counters": engine.counters(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def compare(
    shape: str,
    *,
    against: str | None = None,
    peer_python: Path | None = None,
    workload: Workload | None = None,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """``run``, and the same with a peer where one is named. What was measured of our side is not lost with it."""
    if against not in (None, "vllm"):
        raise ConfigError(f"--against {against}: only vllm can be run beside the engine")
    if against == "vllm":
        against_vllm.check_installed(peer_python)
    workload = workload or Workload()
    figures: dict[str, Any] = {"headrace": run(shape, workload=workload, repeats=repeats, progress=progress)}
    gc.collect()
    torch.cuda.empty_cache()
    if against == "vllm":
        progress("running vLLM")
        try:
            figures["vllm"] = against_vllm.run(shape, workload, repeats=repeats, python=peer_python)
            figures["ratio"] = figures["vllm"]["seconds"] / figures["headrace"]["seconds"]
        except ConfigError as error:
            figures["vllm"] = {"failed": str(error)}
            progress(f"vllm: failed, {str(error)[-300:]}")
    return figures


def table(figures: Mapping[str, Any]) -> Table:
    ours = figures["headrace"]
    parts = [f" in {ours[name]} {name}" for name in ("rounds", "turns") if ours[name] > 1]
    title = (
        f"{ours['shape']}, {ours['tokens']:,} output tokens{''.join(parts)}, {torch.cuda.get_device_name()}"
    )
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("side", "seconds", "tokens/s", "of the memory's limit", "ready after"):
        drawn.add_column(name, justify="right")
    for side in ("headrace", "vllm"):
        if "seconds" in figures.get(side, {}):
            row = figures[side]
            drawn.add_row(
                side,
                f"{row['seconds']:.2f}",
                f"{ours['tokens'] / row['seconds']:,.0f}",
                f"{ours['limit_s'] / row['seconds']:.0%}",
                f"{row['ready_s']:.0f} s",
            )
    return drawn


def generate(
    engine: TorchEngine, workload: Workload, vocab_size: int, repeat: int
) -> tuple[float, list[Completion]]:
    """Seconds, and what was drawn."""
    running = {request.id: request for request in workload.requests(vocab_size, repeat)}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for request in running.values():
        engine.submit(request)
    done: list[Completion] = []
    while engine.has_work:
        for request_id, completion in engine.step():
            done.append(completion)
            following = workload.next_request(running.pop(request_id), completion.token_ids, vocab_size)
            if following is not None:
                running[following.id] = following
                engine.submit(following)
    taken = time.perf_counter() - start
    produced = sum(completion.num_tokens for completion in done)
    assert produced == workload.num_tokens, f"{produced} tokens for {workload.num_tokens}"
    return taken, done


def limit_seconds(model: PreTrainedModel, workload: Workload, bandwidth: float) -> float:
    """Layers and head once a decode step, and the keys and values that are seen, prompts once a group, at this
    bandwidth. Of a mixture, as if every expert were read."""
    lengths_UN, read = workload.lengths_UN, train.bytes_read(model)
    lengths_N = lengths_UN.sum(axis=0)
    # A group's prompt is read as long as any of its samples goes on.
    prompts = workload.prompt_tokens * lengths_N.reshape(-1, workload.group_size).max(axis=1)
    # What a sample has behind its prompt when a turn begins.
    replies_U1 = workload.reply_tokens * np.arange(workload.turns)[:, None]
    behind_UN = lengths_UN.cumsum(axis=0) - lengths_UN + replies_U1
    seen = int(prompts.sum() + (lengths_UN * behind_UN + lengths_UN * (lengths_UN + 1) // 2).sum())
    num_steps = max(int(lengths_N.max()), -(-workload.num_tokens // workload.at_once))
    return (read.weights * num_steps + seen * read.token) / bandwidth
