"""One batch -> the parts that are trained one after the other, and each rank's share of every part.

In: a ``TrainBatch``. Out: batches of the same step and version over fewer samples. Every sample is in
exactly one share, its order is kept, and equal batches are dealt equally. Shares are close to equal in cost;
the attempts at one task stay together where that costs little, since they can share their prompt's
computation. A part with fewer samples than ranks leaves some ranks an empty share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.types import Sample, TrainBatch

BALANCE_TOKENS = 4096
"""Length at which attention costs as much as everything else."""
UNEVENNESS = 1.1
"""How far the costliest share may lie above the mean before groups are divided."""


def minibatches(batch: TrainBatch, count: int) -> list[TrainBatch]:
    """At most ``count`` parts of nearly equal size, in order; each is one optimizer update."""
    parts = np.array_split(np.arange(len(batch.samples)), max(min(count, len(batch.samples)), 1))
    return [replace(batch, samples=tuple(batch.samples[i] for i in part)) for part in parts]


def deal(batch: TrainBatch, *, num_ranks: int, num_minibatches: int = 1) -> list[list[TrainBatch]]:
    """For each rank its share of every minibatch."""
    parts = minibatches(batch, num_minibatches)
    shares = [_shares([_cost(sample) for sample in part.samples], part.samples, num_ranks) for part in parts]
    return [
        [
            replace(part, samples=tuple(part.samples[i] for i in by_rank[rank]))
            for part, by_rank in zip(parts, shares, strict=True)
        ]
        for rank in range(num_ranks)
    ]


def _shares(costs: Sequence[float], samples: Sequence[Sample], num_ranks: int) -> list[list[int]]:
    """Indices of the samples of each rank."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    whole = _longest_first(list(groups.values()), costs, num_ranks)
    if max(sum(costs[i] for i in share) for share in whole) <= UNEVENNESS * sum(costs) / num_ranks:
        return whole
    return _longest_first([[index] for index in range(len(samples))], costs, num_ranks)


def _longest_first(units: Sequence[Sequence[int]], costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """The costliest unit first, each to the rank that has least."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    priced = [(sum(costs[i] for i in unit), unit) for unit in units]
    for cost, unit in sorted(priced, key=lambda item: (-item[0], item[1])):
        rank = min(range(num_ranks), key=lambda r: (totals[r], r))
        shares[rank] += unit
        totals[rank] += cost
    return [sorted(share) for share in shares]


def _cost(sample: Sample) -> float:
    return sample.num_tokens + sample.num_tokens**2 / BALANCE_TOKENS
