"""Every loss against plain Python written from its formula, and its gradient against finite differences.

The value of a loss with a detached weight is not the thing that is descended; its gradient is checked against
the differences of what the weight leaves: weight * A * log policy with the weight held.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from headrace.algos.catalog import LOSSES as ENTRIES
from headrace.algos.composition import compose
from headrace.algos.losses import LOSSES
from headrace.algos.parameters import of_owner
from headrace.algos.ratios import LossTokens, TokenLoss

RNG = np.random.default_rng(11)
SEQUENCE = RNG.permutation(np.repeat(np.arange(5), [1, 4, 6, 8, 9]))
NUM_TOKENS = len(SEQUENCE)
BEHAVIOR = -RNG.uniform(0.05, 2.5, NUM_TOKENS)
ANCHOR = BEHAVIOR + RNG.normal(0, 0.2, NUM_TOKENS)
POLICY = np.minimum(ANCHOR + RNG.normal(0, 0.35, NUM_TOKENS), -1e-3)
ADVANTAGES = np.array([0.7, -1.3, 0.4, -0.6, 1.9])[SEQUENCE]
MEMBERS = [np.flatnonzero(np.equal(SEQUENCE, s)).tolist() for s in range(5)]

Places = list[int]
Values = np.ndarray
Descended = Callable[[Values, int], float]
"""What token i's loss is, as a function of all log-probabilities: detached weights are computed from POLICY."""


def parameters(loss: str) -> dict[str, float]:
    """What the loss is called with; the weight of ``decoupled`` is the objective's."""
    own = of_owner(compose(loss, options=OPTIONS.get(loss, {})).values, loss)
    if loss == "decoupled":
        own = {"dual_clip": own["dual_clip"]}
    return own | CLIPS.get(loss, {})


def mine(policy: torch.Tensor, loss: str) -> TokenLoss:
    tokens = LossTokens(
        policy_T=policy,
        anchor_T=torch.from_numpy(ANCHOR),
        behavior_T=torch.from_numpy(BEHAVIOR),
        advantages_T=torch.from_numpy(ADVANTAGES),
        sequence_T=torch.from_numpy(SEQUENCE),
        num_sequences=6,
    )
    return LOSSES[loss](tokens, **parameters(loss))


CLIPS = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.28},
    "decoupled": {"clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"clip_low": 0.05, "clip_high": 0.07},
    "gmpo": {"clip_low": 0.3, "clip_high": 0.25},
    "cispo": {"clip_low": 0.3, "clip_high": 0.4},
    "aspo": {"clip_low": 0.2, "clip_high": 0.28},
}
OPTIONS = {
    "ppo": {"ppo.dual_clip": 1.5},
    "decoupled": {"decoupled.dual_clip": 1.5},
    "gipo": {"gipo.sigma": 0.4},
    "aspo": {"aspo.cap": 1.2},
    "aipo": {"aipo.cap": 1.1},
    "dppo-tv": {"dppo-tv.delta": 0.03, "dppo-tv.cap": 1.4, "dppo-tv.penalty": 0.1},
    "dro": {"dro.beta": 0.3},
}


def ppo_value(ratio: float, advantage: float, low: float, high: float, dual: float) -> float:
    best = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return -(max(best, dual * advantage) if advantage < 0 and dual else best)


def ppo(x: Values, i: int) -> float:
    return ppo_value(math.exp(x[i] - ANCHOR[i]), ADVANTAGES[i], 0.2, 0.28, 1.5)


def places_of(i: int) -> Places:
    return MEMBERS[int(SEQUENCE[i])]


def gspo(x: Values, i: int) -> float:
    places = places_of(i)
    held = math.exp(sum(POLICY[j] - ANCHOR[j] for j in places) / len(places))
    return ppo_value(held * math.exp(x[i] - POLICY[i]), ADVANTAGES[i], 0.05, 0.07, 0.0)


def clipped_gap(x: Values, i: int) -> float:
    gap = x[i] - ANCHOR[i]
    return min(gap, 0.25) if ADVANTAGES[i] > 0 else max(gap, -0.3)


def gmpo(x: Values, i: int) -> float:
    places = places_of(i)
    held = sum(clipped_gap(POLICY, j) for j in places) / len(places)
    return -ADVANTAGES[i] * math.exp(held + clipped_gap(x, i) - clipped_gap(POLICY, i))


def cispo(x: Values, i: int) -> float:
    return -min(max(math.exp(POLICY[i] - ANCHOR[i]), 0.7), 1.4) * ADVANTAGES[i] * x[i]


def sapo(x: Values, i: int) -> float:
    tau = 1.0 if ADVANTAGES[i] > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (math.exp(x[i] - ANCHOR[i]) - 1)))
    return -ADVANTAGES[i] * 4 / tau * gate


def gipo(x: Values, i: int) -> float:
    held = math.exp(-((POLICY[i] - ANCHOR[i]) ** 2) / (2 * 0.4**2))
    return -held * math.exp(x[i] - ANCHOR[i]) * ADVANTAGES[i]


def aspo(x: Values, i: int) -> float:
    ratio = math.exp(POLICY[i] - ANCHOR[i])
    if ADVANTAGES[i] > 0:
        return 0.0 if ratio > 1.28 else -min(1 / ratio, 1.2) * ADVANTAGES[i] * x[i]
    return 0.0 if ratio < 0.8 else -min(ratio, 1.2) * ADVANTAGES[i] * x[i]


def aipo(x: Values, i: int) -> float:
    return -min(math.exp(POLICY[i] - BEHAVIOR[i]), 1.1) * ADVANTAGES[i] * x[i]


def dppo_tv(x: Values, i: int) -> float:
    moved = math.exp(POLICY[i]) - math.exp(BEHAVIOR[i])
    is_out = moved > 0.03 if ADVANTAGES[i] > 0 else moved < -0.03
    gain = 0.0 if is_out else min(math.exp(POLICY[i] - BEHAVIOR[i]), 1.4) * ADVANTAGES[i] * x[i]
    return -gain + 0.1 * (x[i] - BEHAVIOR[i]) ** 2


def vespo(x: Values, i: int) -> float:
    w = math.prod(math.exp(POLICY[j] - BEHAVIOR[j]) for j in places_of(i))
    k, scale = (2.0, 3.0) if ADVANTAGES[i] >= 0 else (3.0, 2.0)
    return -math.exp(scale) * w**k * math.exp(-scale * w) * ADVANTAGES[i] * x[i]


def dro(x: Values, i: int) -> float:
    return -(ADVANTAGES[i] * x[i] - 0.3 / 2 * (x[i] - BEHAVIOR[i]) ** 2)


REFERENCES: dict[str, Descended] = {
    "ppo": ppo,
    "decoupled": ppo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "gipo": gipo,
    "aspo": aspo,
    "aipo": aipo,
    "dppo-tv": dppo_tv,
    "vespo": vespo,
    "dro": dro,
}


def test_every_loss_has_a_reference() -> None:
    assert REFERENCES.keys() == ENTRIES.keys()


@pytest.mark.parametrize("loss", REFERENCES)
def test_values_match_the_formula(loss: str) -> None:
    expected = [REFERENCES[loss](POLICY, i) for i in range(NUM_TOKENS)]
    np.testing.assert_allclose(
        mine(torch.from_numpy(POLICY), loss).loss_T.numpy(), expected, rtol=1e-10, atol=1e-14
    )


@pytest.mark.parametrize("loss", REFERENCES)
def test_gradients_match_finite_differences(loss: str) -> None:
    policy = torch.from_numpy(POLICY).requires_grad_()
    mine(policy, loss).loss_T.sum().backward()
    assert policy.grad is not None
    numeric = []
    for i in range(NUM_TOKENS):
        up, down = POLICY.copy(), POLICY.copy()
        up[i] += 1e-6
        down[i] -= 1e-6
        numeric.append((REFERENCES[loss](up, i) - REFERENCES[loss](down, i)) / 2e-6)
    np.testing.assert_allclose(policy.grad.numpy(), numeric, atol=1e-7)


@pytest.mark.parametrize("loss", [name for name in REFERENCES if name not in ("dppo-tv", "dro")])
def test_masked_tokens_are_those_without_gradient(loss: str) -> None:
    policy = torch.from_numpy(POLICY).requires_grad_()
    result = mine(policy, loss)
    result.loss_T.sum().backward()
    assert policy.grad is not None
    assert torch.equal(policy.grad == 0, result.masked_T)
    assert result.masked_T.any() == (loss in ("ppo", "decoupled", "gspo", "gmpo", "aspo"))


def test_gmpo_is_the_gradient_of_the_clipped_geometric_mean() -> None:
    """The mean over a sequence of the token form is -A exp(mean of clipped logs), value and gradient."""

    def whole(x: Values) -> float:
        return sum(
            -ADVANTAGES[places[0]] * math.exp(sum(clipped_gap(x, i) for i in places) / len(places))
            for places in MEMBERS
        )

    policy = torch.from_numpy(POLICY).requires_grad_()
    counts = torch.from_numpy(np.bincount(SEQUENCE)[SEQUENCE])
    total = (mine(policy, "gmpo").loss_T / counts).sum()
    total.backward()
    assert float(total.detach()) == pytest.approx(whole(POLICY), rel=1e-12)
    assert policy.grad is not None
    for i in range(NUM_TOKENS):
        up, down = POLICY.copy(), POLICY.copy()
        up[i] += 1e-6
        down[i] -= 1e-6
        assert float(policy.grad[i]) == pytest.approx((whole(up) - whole(down)) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("loss", REFERENCES)
def test_where_all_policies_agree_every_loss_is_the_policy_gradient(loss: str) -> None:
    policy = torch.from_numpy(BEHAVIOR).requires_grad_()
    same = torch.from_numpy(BEHAVIOR)
    tokens = LossTokens(
        policy_T=policy,
        anchor_T=same,
        behavior_T=same,
        advantages_T=torch.from_numpy(ADVANTAGES),
        sequence_T=torch.from_numpy(SEQUENCE),
        num_sequences=5,
    )
    LOSSES[loss](tokens, **parameters(loss)).loss_T.sum().backward()
    assert policy.grad is not None
    np.testing.assert_allclose(policy.grad.numpy(), -ADVANTAGES, rtol=1e-9)


@pytest.mark.parametrize("loss", REFERENCES)
def test_rows_may_be_cut_between_sequences(loss: str) -> None:
    whole = mine(torch.from_numpy(POLICY), loss).loss_T
    for places in MEMBERS:
        row = LossTokens(
            policy_T=torch.from_numpy(POLICY[places]),
            anchor_T=torch.from_numpy(ANCHOR[places]),
            behavior_T=torch.from_numpy(BEHAVIOR[places]),
            advantages_T=torch.from_numpy(ADVANTAGES[places]),
            sequence_T=torch.zeros(len(places), dtype=torch.int64),
            num_sequences=1,
        )
        alone = LOSSES[loss](row, **parameters(loss)).loss_T
        np.testing.assert_allclose(alone.numpy(), whole.numpy()[places], rtol=1e-12)
