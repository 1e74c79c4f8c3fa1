"""A batch from the groups a step takes, and what people want to know of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from headrace.algos.advantages import BATCH_SCALED, BATCH_WHITENED, RUNNING, scale_by_returns, whiten
from headrace.algos.reward_kl import mean_k1, with_kl_to_come
from headrace.algos.running_means import folded, over_means
from headrace.data.samples import NEVER_SAMPLED, oldest_versions
from headrace.runtime.buffer import ReadyGroup
from headrace.runtime.parts import is_late
from headrace.types import Sample, TrainBatch


def make_batch(
    groups: Sequence[ReadyGroup],
    *,
    step: int,
    version: int,
    advantage: str,
    means: Mapping[str, float] | None = None,
    reward_kl: float = 0.0,
) -> TrainBatch:
    """Ordered by (group, attempt), whatever order the groups arrived in. ``means``: the running means of before the
    step, by agent. ``reward_kl``: what a unit of divergence from the reference costs in reward."""
    ordered = sorted(groups, key=lambda group: group.group)
    samples = [
        sample
        # Branches are compared with each other alone, here as in their groups.
        for kind in (False, True)
        for sample in _finished(
            [group for group in ordered if group.is_branch == kind], advantage, means or {}, reward_kl
        )
    ]
    samples.sort(key=attrgetter("group", "attempt"))
    return TrainBatch(step=step, version=version, samples=tuple(samples))


def means_after(
    means: Mapping[str, float], groups: Sequence[ReadyGroup], *, decay: float
) -> dict[str, float]:
    """The running means once these groups are trained, folded in by (group, attempt)."""
    ordered = sorted(groups, key=lambda group: group.group)
    return folded(means, [pair for group in ordered for pair in group.earned], decay=decay)


def _finished(
    groups: Sequence[ReadyGroup], advantage: str, means: Mapping[str, float], reward_kl: float
) -> Sequence[Sample]:
    """The samples of these groups, with what an advantage takes from the whole batch or from earlier ones."""
    samples = tuple(sample for group in groups for sample in group.samples)
    if not samples:
        return ()
    if advantage in RUNNING:
        samples = over_means(samples, [agent for group in groups for agent in group.agents], means)
    if reward_kl:
        samples = with_kl_to_come(samples, reward_kl)
    if advantage in BATCH_WHITENED:
        samples = whiten(samples)
    if advantage in BATCH_SCALED:
        samples = scale_by_returns(samples, [v for group in groups for v in group.worth or group.returns])
    return samples


def describe(groups: Sequence[ReadyGroup], version: int, *, with_kl: bool = False) -> dict[str, float]:
    """Reward, lag and size of a batch trained from ``version``; ``age_spread`` is how many versions lie between its
    oldest sample and its newest, an age being that of the oldest token. ``with_kl``: also the mean divergence
    from the reference, which costs reward."""
    samples = [sample for group in groups for sample in group.samples]
    sampled = np.concatenate([sample.loss_mask for sample in samples])
    lags = version - np.concatenate([sample.versions for sample in samples])[sampled]
    oldest = oldest_versions(samples)
    ages = version - oldest[oldest != NEVER_SAMPLED]
    ordinary = [group for group in groups if not group.is_branch]
    num_late = sum(len(group.samples) for group in groups if is_late(group.group))
    branches = [group.mean_return for group in groups if group.is_branch]
    of_branches = (
        {"pivot_groups": len(branches), "pivot_reward": float(np.mean(branches))} if branches else {}
    )
    return {
        "reward": float(
            np.average([g.mean_return for g in ordinary], weights=[max(1, len(g.returns)) for g in ordinary])
        ),
        "lag_mean": float(lags.mean()) if lags.size else 0.0,
        "lag_max": int(lags.max()) if lags.size else 0,
        "age_spread": int(ages.max() - ages.min()) if ages.size else 0,
        "tokens": int(lags.size),
        "samples": len(samples),
        **({"late_samples": num_late} if num_late else {}),
        **({"reward_kl": mean_k1(samples)} if with_kl else {}),
        **of_branches,
    }
