"""A batch from the groups a step takes, and what people want to know of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.algos.advantages import BATCH_WHITENED, whiten
from headrace.runtime.buffer import ReadyGroup
from headrace.types import TrainBatch


def make_batch(groups: Sequence[ReadyGroup], *, step: int, version: int, advantage: str) -> TrainBatch:
    """Ordered by (group, attempt), whatever order the groups arrived in."""
    ordered = sorted(groups, key=lambda group: group.group)
    if advantage not in BATCH_WHITENED:
        samples = tuple(sample for group in ordered for sample in group.samples)
        return TrainBatch(step=step, version=version, samples=samples)
    # Branches are compared with each other alone, here as in their groups.
    whitened = [
        sample
        for kind in (False, True)
        for sample in whiten([s for group in ordered if group.is_branch == kind for s in group.samples])
    ]
    return TrainBatch(
        step=step, version=version, samples=tuple(sorted(whitened, key=lambda s: (s.group, s.attempt)))
    )


def describe(groups: Sequence[ReadyGroup], version: int) -> dict[str, float]:
    """Reward, lag and size of a batch trained from ``version``."""
    samples = [sample for group in groups for sample in group.samples]
    sampled = np.concatenate([sample.loss_mask for sample in samples])
    lags = version - np.concatenate([sample.versions for sample in samples])[sampled]
    branches = [group.mean_return for group in groups if group.is_branch]
    of_branches = (
        {"pivot_groups": len(branches), "pivot_reward": float(np.mean(branches))} if branches else {}
    )
    return {
        "reward": float(np.mean([group.mean_return for group in groups if not group.is_branch])),
        "lag_mean": float(lags.mean()) if lags.size else 0.0,
        "lag_max": int(lags.max()) if lags.size else 0,
        "tokens": int(lags.size),
        "samples": len(samples),
        **of_branches,
    }
