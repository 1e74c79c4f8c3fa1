from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.algos.clipped_losses import gspo, ppo
from headrace.algos.composition import clips_of, compose
from headrace.algos.losses import LOSSES
from headrace.algos.ratios import LossTokens, TokenLoss
from headrace.errors import ConfigError

RNG = np.random.default_rng(3)
NUM_TOKENS = 24
SEQUENCE = np.sort(RNG.integers(0, 5, NUM_TOKENS))
ANCHOR = -RNG.uniform(0.1, 3.0, NUM_TOKENS)
POLICY = ANCHOR + RNG.normal(0, 0.5, NUM_TOKENS)
ADVANTAGES = np.where(RNG.random(NUM_TOKENS) < 0.5, 1.0, -1.0) * RNG.uniform(0.2, 2.0, NUM_TOKENS)


def tokens(policy: torch.Tensor, advantages: np.ndarray = ADVANTAGES) -> LossTokens:
    return LossTokens(
        policy_T=policy,
        anchor_T=torch.from_numpy(ANCHOR),
        behavior_T=torch.from_numpy(ANCHOR),
        advantages_T=torch.from_numpy(advantages),
        sequence_T=torch.from_numpy(SEQUENCE),
        num_sequences=6,
    )


def run(loss: str, policy: torch.Tensor, **parameters: float) -> TokenLoss:
    return LOSSES[loss](tokens(policy), **parameters)


def ppo_by_hand(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    value = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        value = max(value, dual * advantage)
    return -value


def gspo_ratios() -> list[float]:
    logs = [POLICY[i] - ANCHOR[i] for i in range(NUM_TOKENS)]
    means = {}
    for s in set(SEQUENCE.tolist()):
        members = [logs[i] for i in range(NUM_TOKENS) if SEQUENCE[i] == s]
        means[s] = sum(members) / len(members)
    return [math.exp(means[int(SEQUENCE[i])]) for i in range(NUM_TOKENS)]


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("clips", [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0)])
def test_ppo_clip_matches_its_formula(clips: tuple[float, float], dual_clip: float | None) -> None:
    low, high = clips
    result = run("ppo", torch.from_numpy(POLICY), clip_low=low, clip_high=high, dual_clip=dual_clip or 0.0)
    expected = [
        ppo_by_hand(math.exp(p - a), adv, low, high, dual_clip)
        for p, a, adv in zip(POLICY, ANCHOR, ADVANTAGES, strict=True)
    ]
    np.testing.assert_allclose(result.loss_T.numpy(), expected, rtol=1e-12)


def test_ppo_clip_says_which_tokens_lost_their_gradient() -> None:
    policy = torch.from_numpy(POLICY).requires_grad_()
    result = run("ppo", policy, clip_low=0.2, clip_high=0.28)
    result.loss_T.sum().backward()
    assert policy.grad is not None
    assert torch.equal(policy.grad == 0, result.masked_T)
    assert torch.equal(result.masked_T, result.clipped_low_T | result.clipped_high_T)
    assert result.clipped_low_T.any() and result.clipped_high_T.any()
    ratios = np.exp(POLICY - ANCHOR)
    assert result.clipped_high_T.tolist() == ((ADVANTAGES > 0) & (ratios > 1.28)).tolist()
    assert result.clipped_low_T.tolist() == ((ADVANTAGES < 0) & (ratios < 0.8)).tolist()


def test_cispo_weighs_every_token_and_drops_none() -> None:
    policy = torch.from_numpy(POLICY).requires_grad_()
    result = run("cispo", policy, clip_low=0.3, clip_high=0.4)
    weights = [min(max(math.exp(p - a), 0.7), 1.4) for p, a in zip(POLICY, ANCHOR, strict=True)]
    expected = [-w * adv * p for w, adv, p in zip(weights, ADVANTAGES, POLICY, strict=True)]
    np.testing.assert_allclose(result.loss_T.detach().numpy(), expected, rtol=1e-12)
    result.loss_T.sum().backward()
    assert policy.grad is not None
    np.testing.assert_allclose(policy.grad.numpy(), -np.array(weights) * ADVANTAGES, rtol=1e-12)
    assert not result.masked_T.any()


def test_gspo_clips_the_mean_ratio_of_the_sequence() -> None:
    result = run("gspo", torch.from_numpy(POLICY), clip_low=0.1, clip_high=0.15)
    expected = [ppo_by_hand(s, adv, 0.1, 0.15) for s, adv in zip(gspo_ratios(), ADVANTAGES, strict=True)]
    np.testing.assert_allclose(result.loss_T.numpy(), expected, rtol=1e-12)


def test_gspo_gradient_is_that_of_the_sequence_form() -> None:
    """mean over a sequence of the token form == s A, whose gradient finite differences give."""
    advantages = np.array([1.3, -0.7, 0.4, 0.9, -1.1])[SEQUENCE]
    counts = np.bincount(SEQUENCE, minlength=5)

    def sequence_objective(policy: np.ndarray) -> float:
        total = 0.0
        for s in range(5):
            members = np.flatnonzero(np.equal(SEQUENCE, s))
            total -= math.exp((policy[members] - ANCHOR[members]).mean()) * advantages[members[0]]
        return total

    policy = torch.from_numpy(POLICY).requires_grad_()
    result = gspo(tokens(policy, advantages), clip_low=1.0, clip_high=100.0)
    (result.loss_T / torch.from_numpy(counts[SEQUENCE])).sum().backward()
    step = 1e-6
    numeric = []
    for i in range(NUM_TOKENS):
        moved = POLICY.copy()
        moved[i] += step
        up = sequence_objective(moved)
        moved[i] -= 2 * step
        numeric.append((up - sequence_objective(moved)) / (2 * step))
    assert policy.grad is not None
    np.testing.assert_allclose(policy.grad.numpy(), numeric, atol=1e-8)


@pytest.mark.parametrize("loss", ["ppo", "decoupled"])
def test_gradients_by_finite_differences(loss: str) -> None:
    def value(policy: np.ndarray) -> float:
        clips = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.6}
        return float(run(loss, torch.from_numpy(policy), **clips).loss_T.sum())

    policy = torch.from_numpy(POLICY).requires_grad_()
    run(loss, policy, clip_low=0.2, clip_high=0.28, dual_clip=1.6).loss_T.sum().backward()
    for i in range(NUM_TOKENS):
        up, down = POLICY.copy(), POLICY.copy()
        up[i] += 1e-6
        down[i] -= 1e-6
        assert policy.grad is not None
        assert float(policy.grad[i]) == pytest.approx((value(up) - value(down)) / 2e-6, abs=1e-6)


def test_on_policy_every_loss_is_the_policy_gradient() -> None:
    for loss, scale in [("ppo", 1.0), ("cispo", 1.0), ("decoupled", 1.0), ("gspo", 1.0)]:
        policy = torch.from_numpy(ANCHOR).requires_grad_()
        run(loss, policy, clip_low=0.2, clip_high=0.2).loss_T.sum().backward()
        assert policy.grad is not None
        np.testing.assert_allclose(policy.grad.numpy(), -ADVANTAGES * scale, rtol=1e-9)


def test_a_wild_ratio_stays_finite() -> None:
    policy = torch.tensor([0.0, -300.0], requires_grad=True)
    anchor = torch.tensor([-300.0, 0.0])
    wild = LossTokens(
        policy_T=policy,
        anchor_T=anchor,
        behavior_T=anchor,
        advantages_T=torch.tensor([-1.0, 1.0]),
        sequence_T=torch.tensor([0, 1]),
        num_sequences=2,
    )
    assert torch.isfinite(ppo(wild, clip_low=0.2, clip_high=0.28).loss_T).all()


def test_clips_without_meaning_are_refused() -> None:
    for loss in ("cispo", "gspo"):
        with pytest.raises(ConfigError, match="dual_clip"):
            compose(loss, options={f"{loss}.dual_clip": 3.0})
    with pytest.raises(ConfigError, match="above 1"):
        compose("ppo", clip_low=0.2, clip_high=0.2, options={"ppo.dual_clip": 1.1})
    with pytest.raises(ConfigError, match="clip_low"):
        clips_of("ppo", 1.2, 0.2)
    with pytest.raises(ConfigError, match="no meaning"):
        clips_of("sapo", 0.2, None)
