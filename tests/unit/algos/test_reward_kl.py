"""REINFORCE++ with its KL inside the reward, against loops written from the formula."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest

from headrace.algos.advantages import reinforce_pp, whiten
from headrace.algos.reward_kl import mean_k1, with_kl_to_come
from headrace.errors import InvariantError
from headrace.runtime.batches import describe, make_batch
from headrace.runtime.buffer import ReadyGroup
from headrace.types import NO_KV, Sample

RNG = np.random.default_rng(8)
BETA = 0.3
RETURNS = ((1.0, 0.0, 0.5), (0.0, 0.25, 0.25))
# Sampled, answered and sampled again, so that there is something to pass over.
MASKS = ([0, 1, 1, 1], [0, 0, 1, 0, 0, 1, 1], [0, 1], [0, 1, 0, 1], [0, 0, 1], [0, 1, 1, 0, 1, 1])


def make_sample(group: int, attempt: int, advantage: float) -> Sample:
    mask = np.array(MASKS[3 * group + attempt], dtype=bool)
    logprobs = np.where(mask, -RNG.uniform(0.1, 3.0, len(mask)), 0).astype(np.float32)
    return Sample(
        group=group,
        attempt=attempt,
        token_ids=np.zeros(len(mask), np.int32),
        loss_mask=mask,
        behavior_logprobs=logprobs,
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        temperature=1.0,
        kv_versions=NO_KV,
        # What is said of the prompt and of answers must not matter.
        ref_logprobs=(logprobs + RNG.normal(0, 1, len(mask))).astype(np.float32),
    )


GROUPS = [
    ReadyGroup(
        group=g,
        samples=tuple(make_sample(g, a, float(value)) for a, value in enumerate(reinforce_pp(returns))),
        oldest_version=0,
        mean_return=0.0,
        returns=returns,
    )
    for g, returns in enumerate(RETURNS)
]
SAMPLES = [sample for group in GROUPS for sample in group.samples]


def token_returns(sample: Sample, outcome: float) -> list[float]:
    """Of the sampled tokens: rewards token by token, then their sums from behind."""
    places = [t for t, sampled in enumerate(sample.loss_mask) if sampled]
    assert sample.ref_logprobs is not None
    returns: list[float] = []
    for t in reversed(places):
        reward = -BETA * float(sample.behavior_logprobs[t] - sample.ref_logprobs[t])
        reward += outcome if t == places[-1] else 0.0
        returns.insert(0, reward + (returns[0] if returns else 0.0))
    return returns


def expected_returns() -> list[list[float]]:
    outcomes = [value - statistics.mean(returns) for returns in RETURNS for value in returns]
    return [token_returns(sample, outcome) for sample, outcome in zip(SAMPLES, outcomes, strict=True)]


def test_every_token_has_its_return() -> None:
    for sample, expected in zip(with_kl_to_come(SAMPLES, BETA), expected_returns(), strict=True):
        np.testing.assert_allclose(sample.advantages[sample.loss_mask], expected, rtol=1e-5, atol=1e-6)
        assert not sample.advantages[~sample.loss_mask].any()


def test_a_batch_is_whitened_over_the_returns_of_all_its_tokens() -> None:
    batch = make_batch(GROUPS, step=1, version=0, advantage="reinforce++", reward_kl=BETA)
    values = [value for returns in expected_returns() for value in returns]
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    found = np.concatenate([sample.advantages[sample.loss_mask] for sample in batch.samples])
    np.testing.assert_allclose(found, [(value - mean) / deviation for value in values], rtol=1e-4, atol=1e-5)


def test_without_a_coefficient_nothing_is_paid() -> None:
    batch = make_batch(GROUPS, step=1, version=0, advantage="reinforce++")
    for sample, expected in zip(batch.samples, whiten(SAMPLES), strict=True):
        assert np.array_equal(sample.advantages, expected.advantages)


def test_the_figure_is_the_mean_over_sampled_tokens() -> None:
    gaps = []
    for sample in SAMPLES:
        assert sample.ref_logprobs is not None
        gaps += (sample.behavior_logprobs - sample.ref_logprobs)[sample.loss_mask].tolist()
    assert mean_k1(SAMPLES) == pytest.approx(statistics.mean(gaps), rel=1e-6)
    assert describe(GROUPS, 0, with_kl=True)["reward_kl"] == mean_k1(SAMPLES)
    assert "reward_kl" not in describe(GROUPS, 0)


def test_a_sample_without_a_reference_is_named() -> None:
    with pytest.raises(InvariantError, match="sample 0/1 came without the reference"):
        with_kl_to_come([replace(SAMPLES[1], ref_logprobs=None)], BETA)
