"""REINFORCE++'s KL inside the reward: every sampled token pays for how far it leads from the reference. Pure numpy.

In: samples whose advantages are those of their outcome, with the reference's log-probabilities beside what they were
sampled with. Out: samples whose tokens have their return: with token rewards r_t = [t = last] R - beta k1_t and
k1 = log behavior - log reference, the sum of r from t to the sample's last sampled token. Tokens in between that nobody
sampled are passed over. Nothing here has a gradient, which is what makes k1 right: its mean under the behaviour policy
is the divergence, and the policy gradient does the rest (arXiv 2501.03262).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.errors import InvariantError
from headrace.types import Sample


def with_kl_to_come(samples: Sequence[Sample], coef: float) -> tuple[Sample, ...]:
    """New samples whose advantages are less by ``coef`` times the divergence from each token on."""

    def paid(sample: Sample) -> Sample:
        to_come = np.cumsum(_k1(sample)[::-1])[::-1]
        advantages = np.where(sample.loss_mask, sample.advantages - coef * to_come, 0.0)
        return replace(sample, advantages=advantages.astype(np.float32))

    return tuple(map(paid, samples))


def mean_k1(samples: Sequence[Sample]) -> float:
    """Over all sampled tokens: an estimate of the divergence from the reference."""
    num_tokens = sum(sample.num_loss_tokens for sample in samples)
    return float(sum(_k1(sample).sum() for sample in samples)) / max(num_tokens, 1)


def _k1(sample: Sample) -> np.ndarray:
    """float64 [T], 0 on tokens that were not sampled."""
    if sample.ref_logprobs is None:
        raise InvariantError(
            f"sample {sample.group}/{sample.attempt} came without the reference's log-probabilities, which its reward "
            'is made of; set "kl.reference" in algo.options to engine'
        )
    gap = sample.behavior_logprobs.astype(np.float64) - sample.ref_logprobs
    return np.where(sample.loss_mask, gap, 0.0)
