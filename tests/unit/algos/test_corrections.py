"""Weights and filters against plain Python written from their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from headrace.algos.corrections import (
    FILTERS,
    WEIGHTS,
    CorrectionTokens,
    interpolated_prox,
    m2po_cutoff,
)

RNG = np.random.default_rng(5)
NUM_TOKENS, NUM_SEQUENCES = 40, 7
SEQUENCE = RNG.permutation(np.repeat(np.arange(6), [1, 3, 5, 7, 11, 13]))
"""Sequence 6 has no loss tokens."""
SPREAD = np.array([0.01, 0.02, 0.1, 0.3, 0.6, 0.9, 0.0])[SEQUENCE]
BEHAVIOR = -RNG.uniform(0.1, 3.0, NUM_TOKENS)
PROX = BEHAVIOR + RNG.normal(0, SPREAD)
POLICY = PROX + RNG.normal(0, SPREAD)
ADVANTAGES = np.array([1.0, -1.0, -0.5, 2.0, -2.0, -1.0, 1.0])[SEQUENCE]
MEMBERS = [np.flatnonzero(np.equal(SEQUENCE, s)).tolist() for s in range(NUM_SEQUENCES)]
LOG_RHO = [float(p - b) for p, b in zip(PROX, BEHAVIOR, strict=True)]


def tokens() -> CorrectionTokens:
    return CorrectionTokens(
        policy_T=torch.from_numpy(POLICY),
        prox_T=torch.from_numpy(PROX),
        behavior_T=torch.from_numpy(BEHAVIOR),
        advantages_T=torch.from_numpy(ADVANTAGES),
        sequence_T=torch.from_numpy(SEQUENCE),
        num_sequences=NUM_SEQUENCES,
    )


def of_sequence(value: Callable[[list[int]], float]) -> list[float]:
    """The value of each token's sequence, from the places of its tokens."""
    return [value(MEMBERS[int(s)]) for s in SEQUENCE]


def token_ratios() -> list[float]:
    return [math.exp(gap) for gap in LOG_RHO]


def sequence_ratios() -> list[float]:
    return of_sequence(lambda places: math.prod(math.exp(LOG_RHO[i]) for i in places))


@pytest.mark.parametrize(
    ("name", "parameters", "ratios", "weight"),
    [
        ("tis", {"cap": 1.3}, token_ratios, lambda r: min(r, 1.3)),
        ("icepop", {"low": 0.7, "high": 1.5}, token_ratios, lambda r: r if 0.7 <= r <= 1.5 else 0.0),
        ("mis", {"cap": 1.2}, token_ratios, lambda r: r if r <= 1.2 else 0.0),
        ("seq-tis", {"cap": 0.5}, sequence_ratios, lambda r: min(r, 0.5)),
        ("seq-mis", {"cap": 0.5}, sequence_ratios, lambda r: r if r <= 0.5 else 0.0),
    ],
)
def test_weights_match_their_formulas(
    name: str,
    parameters: dict[str, float],
    ratios: Callable[[], list[float]],
    weight: Callable[[float], float],
) -> None:
    result = WEIGHTS[name](tokens(), **parameters)
    expected = [weight(r) for r in ratios()]
    np.testing.assert_allclose(result.weights_T.numpy(), expected, rtol=1e-9)
    assert result.masked_T.tolist() == [w == 0.0 for w in expected]
    cut = [w != 0.0 and w != r for w, r in zip(expected, ratios(), strict=True)]
    assert result.capped_T.tolist() == cut
    assert any(cut) or result.masked_T.any()
    assert not result.weights_T.requires_grad


def geo_mean(places: list[int]) -> float:
    return math.exp(sum(LOG_RHO[i] for i in places) / len(places))


def mean_k3(places: list[int]) -> float:
    return sum(math.exp(LOG_RHO[i]) - LOG_RHO[i] - 1 for i in places) / len(places)


def largest_k2(places: list[int]) -> float:
    return max(LOG_RHO[i] ** 2 / 2 for i in places)


def mean_gap(places: list[int]) -> float:
    return float(sum(BEHAVIOR[i] - POLICY[i] for i in places)) / len(places)


@pytest.mark.parametrize(
    ("name", "parameters", "kept"),
    [
        (
            "geo-filter",
            {"low": 0.97, "high": 1.05},
            lambda: [0.97 <= m <= 1.05 for m in of_sequence(geo_mean)],
        ),
        ("k3-filter", {"limit": 0.05}, lambda: [m <= 0.05 for m in of_sequence(mean_k3)]),
        ("max-k2-filter", {"limit": 0.1}, lambda: [m <= 0.1 for m in of_sequence(largest_k2)]),
        (
            "opsm",
            {"delta": 0.0},
            lambda: [a >= 0 or g <= 0.0 for a, g in zip(ADVANTAGES, of_sequence(mean_gap), strict=True)],
        ),
    ],
)
def test_filters_match_their_formulas(
    name: str, parameters: dict[str, float], kept: Callable[[], list[bool]]
) -> None:
    result = FILTERS[name](tokens(), **parameters).tolist()
    assert result == kept()
    assert 0 < sum(result) < NUM_TOKENS


@pytest.mark.parametrize("tau", [0.001, 0.04, 0.2, 10.0])
def test_m2po_leaves_out_the_fewest_of_the_largest(tau: float) -> None:
    squares = sorted((gap**2 for gap in LOG_RHO), reverse=True)
    num_dropped = 0
    while num_dropped < len(squares) and np.mean(squares[num_dropped:]) >= tau:
        num_dropped += 1
    cutoff = m2po_cutoff(torch.tensor(LOG_RHO, dtype=torch.float64), tau=tau)
    kept = FILTERS["m2po"](tokens(), cutoff=cutoff)
    assert int((~kept).sum()) == num_dropped
    assert min(squares[:num_dropped], default=math.inf) >= cutoff


def test_m2po_treats_equal_tokens_alike_and_an_empty_batch_well() -> None:
    cutoff = m2po_cutoff(torch.tensor([0.3, 0.3, 0.3, 0.0]), tau=0.05)
    assert cutoff == pytest.approx(0.09)
    assert m2po_cutoff(torch.zeros(0), tau=0.1) == math.inf
    assert m2po_cutoff(torch.ones(3), tau=0.1) == 1.0


def test_interpolated_prox_lies_between_behavior_and_policy_by_lag() -> None:
    lags = torch.tensor([0, 1, 3])
    policy, behavior = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0, -2.0, -2.0])
    # v_prox = v, v_policy = v + 1: the share is lag / (lag + 1).
    assert interpolated_prox(policy, behavior, lags).tolist() == [-2.0, -1.5, -1.25]


@pytest.mark.parametrize("name", [*WEIGHTS, *FILTERS])
def test_a_wild_gap_stays_finite(name: str) -> None:
    parameters = {
        "icepop": {"low": 0.5, "high": 5.0},
        "geo-filter": {"low": 0.9, "high": 1.1},
        "k3-filter": {"limit": 0.1},
        "max-k2-filter": {"limit": 0.1},
        "opsm": {"delta": 0.1},
        "m2po": {"cutoff": 0.1},
    }.get(name, {"cap": 2.0})
    far = torch.tensor([-500.0, 0.0])
    wild = CorrectionTokens(
        policy_T=far,
        prox_T=far,
        behavior_T=far.flip(0),
        advantages_T=torch.tensor([-1.0, -1.0]),
        sequence_T=torch.tensor([0, 1]),
        num_sequences=2,
    )
    result = (WEIGHTS | FILTERS)[name](wild, **parameters)
    values = result if isinstance(result, torch.Tensor) else result.weights_T
    assert torch.isfinite(values.float()).all()
