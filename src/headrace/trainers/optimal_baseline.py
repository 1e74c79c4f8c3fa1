"""VCPO's baseline: returns against what leaves a group's weighed policy gradient the least variance.

In: the minibatches of a step, whose samples' advantages are still their returns, and a way to measure an attempt. Out:
the same minibatches with each group's baseline taken off. An attempt is all its samples together; the attempts of a
group that lie in different minibatches are compared all the same. Measuring takes a backward for every attempt by
itself, so such a step computes everything twice, the first time without packing. arXiv 2602.17616.

Attempts are measured with the weights the step starts from, before anything is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from headrace.algos.advantages import optimal_baseline
from headrace.errors import TrainingError
from headrace.types import Sample, TrainBatch

Measure = Callable[[Sequence[Sample]], tuple[float, float]]
"""For the samples of an attempt: the log of its ratio to the behaviour policy, and the squared norm of the gradient of
its log-probability."""


def over_optimal_baselines(
    parts: Sequence[TrainBatch], measure: Measure
) -> tuple[list[TrainBatch], dict[str, float]]:
    """The minibatches, and how far the baselines are from the means of their groups."""
    groups: dict[int, dict[int, list[Sample]]] = {}
    for sample in (sample for part in parts for sample in part.samples if sample.num_loss_tokens):
        groups.setdefault(sample.group, {}).setdefault(sample.attempt, []).append(sample)
    baselines, shifts = {}, []
    for group, attempts in groups.items():
        returns = [_return_of(samples) for samples in attempts.values()]
        log_weights, squares = zip(*map(measure, attempts.values()), strict=True)
        baselines[group] = optimal_baseline(returns, log_weights, squares)
        shifts.append(abs(baselines[group] - float(np.mean(returns))))
    moved = [replace(part, samples=tuple([_over(s, baselines) for s in part.samples])) for part in parts]
    return moved, {"baseline_shift": float(np.mean(shifts))} if shifts else {}


def _over(sample: Sample, baselines: dict[int, float]) -> Sample:
    advantages = np.where(sample.loss_mask, sample.advantages - baselines.get(sample.group, 0.0), 0.0)
    return replace(sample, advantages=advantages.astype(np.float32))


def _return_of(samples: Sequence[Sample]) -> float:
    values = np.concatenate([sample.advantages[sample.loss_mask] for sample in samples])
    if np.ptp(values):
        raise TrainingError(
            f"sample {samples[0].group}/{samples[0].attempt}: its tokens have different returns, but the baseline of "
            "algo.advantage = vcpo is that of attempts; use another algo.advantage"
        )
    return float(values[0])
