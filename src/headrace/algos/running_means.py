"""RAE: an attempt's return against a running mean of what the same agent earned before. Pure numpy.

In: the samples of a batch, who each of them belongs to, and the means as they stood before the step. Out: the samples
with the means taken off, and the means with the step's returns in them. A batch is held against means that know
nothing of it, so the baseline does not depend on what it is a baseline for; the mean of an agent that has not earned
anything yet is 0.

Role-conditioned advantage estimation: SPIRAL, arXiv 2506.24119; as prime-rl has it, with the mean of before the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from headrace.types import Sample


def over_means(
    samples: Sequence[Sample], agents: Sequence[str], means: Mapping[str, float]
) -> tuple[Sample, ...]:
    """New samples whose advantages, so far their returns, are less by the mean of their agent."""

    def over(sample: Sample, mean: float) -> Sample:
        advantages = np.where(sample.loss_mask, sample.advantages - mean, 0.0)
        return replace(sample, advantages=advantages.astype(np.float32))

    return tuple([over(s, means.get(agent, 0.0)) for s, agent in zip(samples, agents, strict=True)])


def folded(
    means: Mapping[str, float], earned: Iterable[tuple[str, float]], *, decay: float
) -> dict[str, float]:
    """The means after these (agent, return), one after the other: mean = decay mean + (1 - decay) return."""
    after = dict(means)
    for agent, value in earned:
        after[agent] = decay * after.get(agent, 0.0) + (1.0 - decay) * value
    return after
