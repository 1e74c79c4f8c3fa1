"""A batch from the groups a step takes, and what people want to know of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.algos.advantages import BATCH_SCALED, BATCH_WHITENED, scale_by_returns, whiten
from headrace.runtime.buffer import ReadyGroup
from headrace.types import TrainBatch


def make_batch(groups: Sequence[ReadyGroup], *, step: int, version: int, advantage: str) -> TrainBatch:
    """Ordered by (group, attempt), whatever order the groups arrived in."""
    ordered = sorted(groups, key=lambda group: group.group)
    samples = tuple(sample for group in ordered for sample in group.samples)
    if advantage in BATCH_WHITENED:
        samples = whiten(samples)
    if advantage in BATCH_SCALED:
        samples = scale_by_returns(samples, [value for group in ordered for value in group.returns])
    return TrainBatch(step=step, version=version, samples=samples)


def describe(groups: Sequence[ReadyGroup], version: int) -> dict[str, float]:
    """Reward, lag and size of a batch trained from ``version``."""
    samples = [sample for group in groups for sample in group.samples]
    sampled = np.concatenate([sample.loss_mask for sample in samples])
    lags = version - np.concatenate([sample.versions for sample in samples])[sampled]
    return {
        "reward": float(np.mean([group.mean_return for group in groups])),
        "lag_mean": float(lags.mean()) if lags.size else 0.0,
        "lag_max": int(lags.max()) if lags.size else 0,
        "tokens": int(lags.size),
        "samples": len(samples),
    }
