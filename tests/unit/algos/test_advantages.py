from __future__ import annotations

import statistics

import numpy as np
import pytest

from headrace.algos.advantages import (
    ADVANTAGES,
    BATCH_WHITENED,
    BY_THE_TRAINER,
    RUNNING,
    dr_grpo,
    grpo,
    is_zero_variance,
    lite_ppo,
    maxrl,
    optimal_baseline,
    overlong_penalty,
    reinforce_pp,
    rloo,
    scale_by_returns,
    whiten,
)
from headrace.types import NO_KV, Sample

RETURNS = [1.0, 0.0, 0.25, 1.0, -0.5]


def sample(advantages: list[float], loss_mask: list[bool]) -> Sample:
    num_tokens = len(advantages)
    return Sample(
        group=0,
        attempt=0,
        token_ids=np.zeros(num_tokens, np.int32),
        loss_mask=np.array(loss_mask),
        behavior_logprobs=np.zeros(num_tokens, np.float32),
        versions=np.zeros(num_tokens, np.int32),
        advantages=np.array(advantages, np.float32),
        temperature=1.0,
        kv_versions=NO_KV,
    )


def test_grpo_uses_the_unbiased_standard_deviation() -> None:
    mean, std = statistics.mean(RETURNS), statistics.stdev(RETURNS)
    expected = [(value - mean) / (std + 1e-4) for value in RETURNS]
    np.testing.assert_allclose(grpo(RETURNS), expected, rtol=1e-6)


def test_dr_grpo_only_centres() -> None:
    mean = sum(RETURNS) / len(RETURNS)
    np.testing.assert_allclose(dr_grpo(RETURNS), [value - mean for value in RETURNS], rtol=1e-6)


def test_rloo_compares_with_the_other_attempts() -> None:
    expected = []
    for i, value in enumerate(RETURNS):
        others = [other for j, other in enumerate(RETURNS) if j != i]
        expected.append(value - sum(others) / len(others))
    np.testing.assert_allclose(rloo(RETURNS), expected, rtol=1e-6)


def test_maxrl_divides_by_the_mean() -> None:
    returns = [1.0, 0.0, 0.5, 0.0]
    np.testing.assert_allclose(maxrl(returns), [(r - 0.375) / 0.375 for r in returns], rtol=1e-6)
    assert maxrl([0.0, 0.0]).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"below 0, not -0\.5.*algo\.advantage"):
        maxrl(RETURNS)


def test_lite_ppo_centres_by_group_and_scales_by_batch() -> None:
    groups = [[1.0, 0.0], [0.25, 0.5]]
    returns = [value for group in groups for value in group]
    samples = [sample([0.0, a], [False, True]) for group in groups for a in lite_ppo(group)]
    scaled = scale_by_returns(samples, returns)
    deviation = statistics.stdev(returns)
    expected = [(r - statistics.mean(g)) / (deviation + 1e-4) for g in groups for r in g]
    np.testing.assert_allclose([s.advantages[1] for s in scaled], expected, rtol=1e-6)
    assert scale_by_returns(samples[:1], [1.0]) == tuple(samples[:1])


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - RUNNING - BY_THE_TRAINER))
def test_equal_returns_give_no_direction(name: str) -> None:
    assert ADVANTAGES[name]([0.5, 0.5, 0.5]).tolist() == [0.0, 0.0, 0.0]
    # A lone attempt can only be compared with the batch, which is what REINFORCE++ does later.
    assert ADVANTAGES[name]([0.5]).tolist() == [0.5 if name in BATCH_WHITENED else 0.0]
    assert ADVANTAGES[name]([0.0, 1.0]).dtype == np.float32


def test_the_optimal_baseline_is_what_the_formula_says() -> None:
    weights, squares = [0.5, 2.0, 1.0, 1.5, 0.1], [4.0, 1.0, 0.0, 2.5, 9.0]
    shares = [w * w * g for w, g in zip(weights, squares, strict=True)]
    expected = sum(s * r for s, r in zip(shares, RETURNS, strict=True)) / sum(shares)
    found = optimal_baseline(RETURNS, np.log(weights), squares)
    assert found == pytest.approx(expected, rel=1e-12)

    def second_moment(baseline: float) -> float:
        return sum(s * (r - baseline) ** 2 for s, r in zip(shares, RETURNS, strict=True))

    assert second_moment(found) < min(second_moment(found - 0.01), second_moment(found + 0.01))
    # However large the ratios, and where there is nothing to weigh.
    assert optimal_baseline([1.0, 0.0], [900.0, 900.0], [1.0, 3.0]) == pytest.approx(0.25)
    assert optimal_baseline([1.0, 0.0], [0.0, 0.0], [0.0, 0.0]) == 0.5
    assert optimal_baseline([0.7, 0.7], [-3.0, 2.0], [1.0, 3.0]) == pytest.approx(0.7)


def test_returns_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        grpo([1.0, float("nan")])


def test_whiten_covers_loss_tokens_of_the_whole_batch_only() -> None:
    first, second = reinforce_pp([3.0, -1.0]), reinforce_pp([0.0, 1.0])
    samples = [
        sample([0, first[0], first[0]], [False, True, True]),
        sample([0, first[1], 0, first[1]], [False, True, False, True]),
        sample([0, second[1]], [False, True]),
    ]
    values = [first[0], first[0], first[1], first[1], second[1]]
    mean, std = statistics.mean(map(float, values)), statistics.stdev(map(float, values))
    whitened = whiten(samples)
    tokens = np.concatenate([s.advantages[s.loss_mask] for s in whitened])
    np.testing.assert_allclose(tokens, [(v - mean) / std for v in values], rtol=1e-5)
    assert all((s.advantages[~s.loss_mask] == 0).all() for s in whitened)
    assert samples[0].advantages[1] == first[0]


def test_whiten_leaves_nothing_to_divide_by_alone() -> None:
    assert whiten([]) == ()
    (only,) = whiten([sample([0.0, 2.0], [False, True])])
    assert only.advantages[1] == 2.0


def test_overlong_penalty_is_a_ramp() -> None:
    def penalty(num_tokens: int) -> float:
        return overlong_penalty(num_tokens, max_tokens=100, buffer_tokens=20, factor=2.0)

    assert [penalty(n) for n in (0, 80, 85, 90, 100, 120)] == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0]
    with pytest.raises(ValueError, match="buffer_tokens"):
        overlong_penalty(1, max_tokens=10, buffer_tokens=11)


def test_zero_variance_ignores_rounding_but_not_small_rewards() -> None:
    assert is_zero_variance([0.1 + 0.2, 0.3])
    assert is_zero_variance([1.0])
    assert not is_zero_variance([0.0, 1e-6])
