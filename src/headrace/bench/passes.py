"""``headrace bench passes``: what single decode passes of the engine on a GPU consist of, kernel by kernel.

In: a model shape and, for each kind of pass, how many rows decode and how many tokens each has behind the prompt that
its group of eight shares. Out: the time of a whole pass, taken without a profiler, beside the least that reading its
weights, keys and values can take; then, under a profiler, every kernel with its launches and its time. Kernels may
run at the same time, and a profiler slows the host down, so kernels and the whole are taken apart from each other.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from headrace.bench import train
from headrace.bench.rates import copy_bandwidth
from headrace.bench.shapes import create_random_model
from headrace.engines.make import torch_engine
from headrace.engines.torch_engine import TorchEngine
from headrace.errors import ConfigError
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import Request, Sampling

GROUP_SIZE, PROMPT_TOKENS = 8, 256
_WARM_PASSES, _TIMED_PASSES, _PROFILED_PASSES = 5, 30, 10
_MOST_PROMPT_PASSES = 2000
"""Until all rows decode; those that do already draw a token in each."""
_NAME_LENGTH = 60


class Kind(NamedTuple):
    """Of passes."""

    rows: int
    own_tokens: int
    """Of each row, behind its prompt."""


USUAL = (Kind(24, 60), Kind(24, 1500), Kind(64, 800), Kind(160, 500), Kind(256, 300), Kind(512, 60))


def kind_of(text: str) -> Kind:
    """``ROWSxTOKENS``, such as 24x1500."""
    rows, _, own_tokens = text.partition("x")
    if not (rows.isdecimal() and own_tokens.isdecimal() and int(rows) and int(own_tokens)):
        raise ConfigError(f"--rows {text}: rows and tokens of each, such as 24x1500, are needed")
    return Kind(int(rows), int(own_tokens))


def run(
    shape: str,
    *,
    kinds: Sequence[Kind] = USUAL,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """On a GPU; all figures as plain numbers."""
    model = create_random_model(shape)
    engine = torch_engine(
        model,
        ledger=TimeLedger(ENGINE_ACTIVITIES),
        max_running=max(kind.rows for kind in kinds),
        progress=progress,
    )
    bandwidth = copy_bandwidth()
    measured = []
    for kind in kinds:
        progress(f"{kind.rows} rows with {kind.own_tokens} tokens each")
        found = measure(engine, kind, int(model.config.vocab_size))
        limit_s = bytes_of(model, kind.rows, found["own_tokens_timed"]) / bandwidth
        measured.append({**found, "limit_s": limit_s, "fraction_of_limit": limit_s / found["pass_s"]})
    return {
        "shape": shape,
        "device": torch.cuda.get_device_name(),
        "bandwidth_bytes_per_s": bandwidth,
        "kinds": measured,
    }


def measure(
    engine: TorchEngine, kind: Kind, vocab_size: int, *, timed: int = _TIMED_PASSES, profiled: int = _PROFILED_PASSES
) -> dict[str, Any]:  # fmt: skip
    """``engine`` is left without requests, as it must be before."""
    requests = _requests(kind, vocab_size, max_tokens=_MOST_PROMPT_PASSES + _WARM_PASSES + timed + profiled)
    for request in requests:
        engine.submit(request)
    sampled = -engine.counters()["generated_tokens"]
    _compute_prompts(engine, kind)
    _step(engine, _WARM_PASSES)
    sampled += engine.counters()["generated_tokens"]
    before, start = engine.counters(), time.perf_counter()
    _step(engine, timed)
    pass_s = (time.perf_counter() - start) / timed
    _check_passes(engine, kind, before, timed)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        _step(engine, profiled)
    engine.abort([request.id for request in requests])
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    launches = ((event.name, event.time_range.elapsed_us()) for event in on_device)
    return {
        "rows": kind.rows,
        "own_tokens": kind.own_tokens,
        "own_tokens_timed": kind.own_tokens + sampled / kind.rows + timed / 2,
        "pass_s": pass_s,
        "kernels": by_kernel(launches, profiled),
    }


def by_kernel(launches: Iterable[tuple[str, float]], num_passes: int) -> list[dict[str, Any]]:
    """Launches and microseconds a pass of each name, the longest first, from the launches of several passes."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, us in launches:
        found[name].append(us)
    return [
        {"kernel": name, "launches": len(found[name]) / num_passes, "us": sum(found[name]) / num_passes}
        for name in sorted(found, key=lambda name: -sum(found[name]))
    ]


def bytes_of(model: PreTrainedModel, rows: int, own_tokens: float) -> float:
    """What a pass must read: layers and head, prompts once a group, and what each row has for itself."""
    read = train.bytes_read(model)
    return read.weights + (-(-rows // GROUP_SIZE) * PROMPT_TOKENS + rows * own_tokens) * read.token


def _requests(kind: Kind, vocab_size: int, max_tokens: int) -> list[Request]:
    """Their own tokens are told with the prompt, so that they need not be drawn one by one."""
    rng = np.random.default_rng(kind)
    num_groups = -(-kind.rows // GROUP_SIZE)
    prompts = rng.integers(0, vocab_size, (num_groups, PROMPT_TOKENS))
    own = rng.integers(0, vocab_size, (kind.rows, kind.own_tokens))
    return [
        Request(
            id=f"{kind.rows}x{kind.own_tokens}/{row}",
            prompt_ids=np.concatenate((prompts[row // GROUP_SIZE], own[row])).astype(np.int32),
            sampling=Sampling(max_tokens=max_tokens),
            seed=row,
        )
        for row in range(kind.rows)
    ]


def _compute_prompts(engine: TorchEngine, kind: Kind) -> None:
    """Until all rows decode."""
    for _ in range(_MOST_PROMPT_PASSES):
        before = engine.counters()["prompt_passes"]
        engine.step()
        after = engine.counters()
        if after["running"] == kind.rows and after["prompt_passes"] == before:
            return
    raise _too_large(kind, f"{after['running']:.0f} decode after {_MOST_PROMPT_PASSES} passes")


def _check_passes(engine: TorchEngine, kind: Kind, before: Mapping[str, float], timed: int) -> None:
    """That since then there were so many passes, each of all rows and of nothing else."""
    after = engine.counters()
    expected = {name: before[name] for name in ("prompt_passes", "preemptions")}
    expected |= {"passes": before["passes"] + timed, "running": kind.rows}
    for name, value in expected.items():
        if after[name] != value:
            raise _too_large(
                kind, f"not all decoded in {timed} passes ({name}: {after[name]:.0f}, not {value:.0f})"
            )


def _too_large(kind: Kind, seen: str) -> ConfigError:
    return ConfigError(
        f"--rows {kind.rows}x{kind.own_tokens}: of {kind.rows} rows {seen}; there is no room for their keys and "
        "values, or the model's context is too short: ask for fewer rows or tokens"
    )


def _step(engine: TorchEngine, count: int) -> None:
    """So many passes, from the first launch until the last has landed."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for _ in range(count):
        engine.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def table(figures: Mapping[str, Any]) -> Group:
    """The figures for people, one table for each kind of pass."""
    drawn: list[Table | Text] = [Text(f"{figures['shape']} on {figures['device']}")]
    for kind in figures["kinds"]:
        kernels_us = sum(kernel["us"] for kernel in kind["kernels"])
        title = (
            f"\n{kind['rows']} rows with {kind['own_tokens']:,} tokens each behind prompts of {PROMPT_TOKENS}: "
            f"{kind['pass_s'] * 1e3:.2f} ms a pass, {kernels_us * 1e-3:.2f} ms of kernels, "
            f"{kind['fraction_of_limit']:.0%} of the memory's limit"
        )
        part = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        part.add_column("kernel")
        for name in ("launches", "us a pass", "of all kernels"):
            part.add_column(name, justify="right")
        for kernel in kind["kernels"]:
            part.add_row(
                kernel["kernel"][:_NAME_LENGTH],
                f"{kernel['launches']:.1f}",
                f"{kernel['us']:,.1f}",
                f"{kernel['us'] / kernels_us:.1%}",
            )
        drawn.append(part)
    return Group(*drawn)
