"""Recorded log-probabilities against those of the weights that drew them, where these are still on disk.

In: a ``Recording`` and its run directory. Out: by version, how many tokens were computed again as a training step would
(packed rows, kept sets, recorded routes, the run's dtype and device) and how far they are from the record. Only samples
whose tokens and key-value rows are all of that one version can be compared. The version of a checkpoint is in its
``trainer.json``; version 0 is the model the run started from, unless a warm start changed it first.

Legend: N sampled tokens of a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace import build
from headrace.config import Settings
from headrace.data.packing import pack
from headrace.data.samples import build_samples
from headrace.models.float_residual import keep_float_residual
from headrace.models.loading import load_model
from headrace.models.packed_attention import use_packed_attention
from headrace.runtime.recording import Recording
from headrace.trainers.logprobs import head_values, row_tensors
from headrace.trainers.routes import route_replay
from headrace.types import EpisodeGroup, Sample

LARGEST_MEAN_GAP = 0.05
"""Far above what bfloat16 rounds away on average, far below what other weights or other tokens make of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    version: int
    weights: str
    num_samples: int
    num_tokens: int
    mean: float
    """Of \\|recomputed - recorded\\|, as ``largest``."""
    largest: float


def recompute(recording: Recording, run_dir: Path, settings: Settings) -> list[Gap]:
    by_version: dict[int, list[Sample]] = {}
    for sample in _samples(recording):
        version = _only_version(sample)
        if version is not None:
            by_version.setdefault(version, []).append(sample)
    weights = weights_by_version(run_dir, settings)
    return [
        _gap(version, weights[version], samples, settings)
        for version, samples in sorted(by_version.items())
        if version in weights
    ]


def weights_by_version(run_dir: Path, settings: Settings) -> dict[int, Path]:
    found = {}
    start = settings.model.path
    if start is not None and Path(start).is_dir():
        found[0] = Path(start)
    for directory in sorted((run_dir / "checkpoints").glob("step-*")):
        position = directory / "trainer.json"
        if position.is_file():
            found[int(json.loads(position.read_text())["version"])] = directory
    return found


def _samples(recording: Recording) -> Iterator[Sample]:
    for group in recording.groups.values():
        episodes = tuple(group.episodes())
        if episodes:
            whole = EpisodeGroup(
                group=group.group,
                task=episodes[0].task,
                episodes=episodes,
                returns=(0.0,) * len(episodes),
            )
            yield from build_samples(whole, np.zeros(len(episodes)))


def _only_version(sample: Sample) -> int | None:
    """None: several versions had a part in it, or it was drawn greedily."""
    versions = set(sample.versions[sample.loss_mask].tolist()) | set(sample.kv_versions[:, 0].tolist())
    return versions.pop() if len(versions) == 1 and sample.temperature > 0 else None


@torch.no_grad()
def _gap(version: int, weights: Path, samples: list[Sample], settings: Settings) -> Gap:
    device = build.device(settings.model.device)
    model = load_model(weights, dtype=build.dtype(settings, device), device=device)
    keep_float_residual(model)
    use_packed_attention(model)
    route_replay(model, settings.algo.routing, model.device)
    gaps = []
    for row in pack(samples, row_tokens=build.row_tokens(settings, device)):
        logprobs_N = head_values(model, row_tensors(row, device=device)).logprobs_N.cpu().numpy()
        gaps.append(np.abs(logprobs_N - row.behavior_logprobs[row.loss_mask]))
    gap_N = np.concatenate(gaps)
    return Gap(
        version=version,
        weights=str(weights),
        num_samples=len(samples),
        num_tokens=len(gap_N),
        mean=float(gap_N.mean()),
        largest=float(gap_N.max()),
    )
