"""Is everything in order? One finding per check, each with what to do about it.

In: nothing (only the machine is examined) or the settings of a run. Out: findings, in the order a run would
meet the trouble. A check that fails does not stop the others, unless they need what it could not get.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from headrace import build, roles
from headrace.config import Settings
from headrace.data import masks
from headrace.errors import HeadraceError
from headrace.types import (
    NO_KV,
    Completion,
    Episode,
    Request,
    Sampling,
    Task,
    Trajectory,
    Turn,
)
from headrace.weights.segment_directory import segment_root

Verdict = Literal["ok", "warn", "fail"]
MISMATCH = {"float32": 1e-4, "bfloat16": 5e-2}
"""Mean difference of engine and trainer log-probabilities above which something is wrong."""

_USUAL_HEAD_SIZE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    verdict: Verdict
    detail: str


def examine(settings: Settings | None) -> list[Finding]:
    findings = list(_machine())
    if settings is None:
        return findings
    facts: dict[str, Any] = {}
    for name, check in _RUN_CHECKS:
        try:
            findings.extend(check(settings, facts))
        except HeadraceError as error:
            findings.append(Finding(check=name, verdict="fail", detail=str(error)))
            break
    return findings


def show(findings: list[Finding], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for finding in findings:
        mark = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(mark, finding.check, finding.detail)
    console.print(table)
    failed = sum(finding.verdict == "fail" for finding in findings)
    console.print("everything is in order" if not failed else f"{failed} check(s) failed: see above")


def _machine() -> Iterator[Finding]:
    import torch
    import transformers

    python, libraries = platform.python_version(), (torch, transformers)
    versions = [f"Python {python}", *(f"{lib.__name__} {lib.__version__}" for lib in libraries)]
    yield Finding(check="software", verdict="ok", detail=", ".join(versions))
    cores = len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count() or 1
    enough: Verdict = "ok" if cores >= 2 else "warn"
    advice = "" if cores >= 2 else ": generation and training will take turns on it"
    yield Finding(check="processors", verdict=enough, detail=f"{cores} core(s){advice}")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Finding(check="accelerators", verdict="ok", detail=", ".join(gpus) or "none: the CPU path is used")
    if gpus:
        yield from _kernels()
    root = segment_root()
    free = shutil.disk_usage(root).free
    yield Finding(
        check="shared memory",
        verdict="ok" if free > 2**28 else "warn",
        detail=f"{free / 2**30:.1f} GiB free in {root}"
        + ("" if free > 2**28 else ": weights of large models will not fit; enlarge it"),
    )


def _kernels() -> Iterator[Finding]:
    import torch

    from headrace.kernels import gated_library
    from headrace.models import flash

    device = torch.device("cuda", 0)
    trained = f"heads of size {_USUAL_HEAD_SIZE} are trained"
    yield _computed_by("attention", trained, lambda: flash.kernels_in_use(device, _USUAL_HEAD_SIZE))
    yield _computed_by(
        "gated layers", "those with many rows are computed", lambda: gated_library.kernels_in_use(device)
    )


def _computed_by(check: str, what: str, kernels_in_use: Callable[[], str]) -> Finding:
    try:
        return Finding(check=check, verdict="ok", detail=f"{what} by the kernels of {kernels_in_use()}")
    except HeadraceError as error:
        return Finding(check=check, verdict="fail", detail=str(error))


def _model(settings: Settings, facts: dict[str, Any]) -> Iterator[Finding]:
    build.check_packages(settings)
    directory = build.model_directory(settings)
    facts["renderer"] = build.policy_renderer(settings)
    facts["told"] = {
        "settings": settings.model_dump(mode="json", exclude_none=True),
        "model": str(directory),
        "version": 0,
    }
    yield Finding(
        check="tokenizer",
        verdict="ok",
        detail=f"{facts['renderer'].vocab_size} tokens, stops at {facts['renderer'].stop_ids}, "
        f"context {facts['renderer'].max_context or 'not stated'}",
    )


def _weights(settings: Settings, facts: dict[str, Any]) -> Iterator[Finding]:
    model = facts["architecture"] = _architecture(settings, facts["told"]["model"])
    item_bytes = 2 if build.dtype(settings) == "bfloat16" else 4
    num_bytes = (model.num_adapter_weights or model.num_weights) * item_bytes
    route = build.route(settings, version_bytes=num_bytes)
    detail = f"travel by {route.transport}: {route.why}; {route.bundle} bundles: {route.why_bundle}"
    free = shutil.disk_usage(segment_root()).free
    needed = build.versions_held(settings) * num_bytes
    fits = route.transport != "shared_memory" or needed <= free
    advice = (
        ""
        if fits
        else f"; the versions held at once take {needed / 1e9:.2f} GB and {free / 1e9:.2f} are free: set "
        "weights.transport to auto"
    )
    yield Finding(check="weights", verdict="ok" if fits else "fail", detail=detail + advice)


def _tasks(settings: Settings, facts: dict[str, Any]) -> Iterator[Finding]:
    source = build.task_source(settings)
    facts["tasks"] = [source.task(i) for i in range(min(8, len(source)))]
    lengths = [len(facts["renderer"].prompt_ids(task)) for task in facts["tasks"]]
    facts["longest_prompt"] = max(lengths)
    detail = (
        f"{len(source)} tasks; prompts of {min(lengths)} to {max(lengths)} tokens in the first {len(lengths)}"
    )
    yield Finding(check="tasks", verdict="ok", detail=detail)


def _context(settings: Settings, facts: dict[str, Any]) -> Iterator[Finding]:
    """A sequence is never divided among devices, so memory bounds its length."""
    from headrace.memory.plan import longest_sequence, memory_of

    kind, model = build.device(settings.model.device), facts["architecture"]
    longest = longest_sequence(settings, model, kind=kind, device_bytes=memory_of(kind))
    wanted = min(facts["longest_prompt"] + settings.rollout.max_tokens, model.context_tokens)
    fine = longest >= wanted
    advice = "" if fine else f": {wanted:,} are wanted; lower rollout.max_tokens, or ask headrace plan memory"
    detail = f"up to {longest:,} tokens can be trained, by estimate; one device computes a sequence{advice}"
    yield Finding(check="sequence length", verdict="ok" if fine else "fail", detail=detail)


def _architecture(settings: Settings, model: str) -> Any:
    import torch

    from headrace.memory.architecture import examine as examine_sizes
    from headrace.models.loading import load_config

    return examine_sizes(load_config(model), getattr(torch, build.dtype(settings)), build.lora(settings))


def _rewards(settings: Settings, facts: dict[str, Any]) -> Iterator[Finding]:
    """The gold answer must earn more than nonsense."""
    told = build.scorer_settings(settings, list(settings.reward.functions))
    if told is None:
        yield Finding(check="reward", verdict="warn", detail="reward.functions is not set: nothing to check")
        return
    column = "answer"
    gold = [task for task in facts["tasks"] if column in task.columns]
    if not gold:
        yield Finding(
            check="reward",
            verdict="warn",
            detail=f"tasks have no {column!r} column: gold answers are unknown",
        )
        return
    scorer = build.build_scorer(told)
    names = list(told["functions"])

    async def score(text_of: Callable[[Task], str]) -> np.ndarray:
        rows = [await scorer.score(task, [_as_episode(task, text_of(task))]) for task in gold]
        return np.array([[row[0][name] or 0.0 for name in names] for row in rows]).mean(axis=0)

    async def both() -> tuple[np.ndarray, np.ndarray]:
        return await score(lambda task: str(task.columns[column])), await score(lambda task: "")

    right, empty = asyncio.run(both())
    for name, good, bad in zip(names, right, empty, strict=True):
        fine = good > bad
        advice = "" if fine else f": the reward cannot tell them apart; check {name} or {column!r}"
        yield Finding(
            check=f"reward {name}",
            verdict="ok" if fine else "fail",
            detail=f"gold answers earn {good:.3f}, empty ones {bad:.3f}{advice}",
        )


def _agreement(settings: Settings, facts: dict[str, Any]) -> Iterator[Finding]:
    """Engine and trainer must give the same log-probabilities for the same tokens."""
    from headrace.models.loading import load_model
    from headrace.trainers.agreement import trainer_logprobs

    sampling = build.sampling(settings, facts["renderer"])
    prompts = [facts["renderer"].prompt_ids(task) for task in facts["tasks"][:4]]
    requests = [
        Request(id=f"{i}/0/0", prompt_ids=ids, sampling=sampling, seed=i) for i, ids in enumerate(prompts)
    ]

    async def sample() -> list[Completion]:
        engine = roles.engine_role(facts["told"])
        try:
            return list(await asyncio.gather(*(engine.generate(request) for request in requests)))
        finally:
            await engine.close()

    completions = asyncio.run(sample())
    yield Finding(check="engine", verdict="ok", detail="agrees with a plain forward pass on a random prompt")
    model = load_model(facts["told"]["model"], device=build.device(settings.model.device))
    gaps = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = np.concatenate([prompt, completion.token_ids])
        kept = completion.sampling_mask
        mask = None if kept is None else masks.join([masks.whole(len(prompt)), kept])
        logprobs = trainer_logprobs(
            model, ids, temperature=sampling.temperature, dtype=build.dtype(settings), mask=mask
        )
        gaps.append(np.abs(logprobs[len(prompt) :] - completion.logprobs))
    gap = np.concatenate(gaps)
    limit = MISMATCH[build.dtype(settings)]
    fine = float(gap.mean()) <= limit
    advice = "" if fine else f", over {limit:g}: use model.dtype float32 or report the model"
    yield Finding(
        check="log-probabilities",
        verdict="ok" if fine else "fail",
        detail=f"engine and trainer differ by {gap.mean():.1e} on average, {gap.max():.1e} at most{advice}",
    )


def _as_episode(task: Task, text: str) -> Episode:
    empty = np.zeros(0, np.int32)
    completion = Completion(
        token_ids=empty,
        logprobs=empty.astype(np.float32),
        versions=empty,
        finish_reason="stop",
        kv_versions=NO_KV,
    )
    sampling = Sampling(max_tokens=1)
    turn = Turn(prompt_ids=empty, completion=completion, sampling=sampling, seed=0, engine="doctor")
    return Episode(group=0, attempt=0, task=task, trajectories=(Trajectory(turns=(turn,), text=text),))


_RUN_CHECKS = (
    ("model", _model),
    ("weights", _weights),
    ("tasks", _tasks),
    ("sequence length", _context),
    ("reward", _rewards),
    ("engine", _agreement),
)
