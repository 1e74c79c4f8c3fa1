from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.algos.aggregation import AGGREGATIONS, aggregate, component_weights, sequence_weights
from headrace.errors import ConfigError

TOKEN_LOSSES = [[1.0, 2.0, 3.0], [10.0], [], [4.0, 6.0]]
MAX_TOKENS = 8


def by_hand(name: str) -> float:
    trained = [losses for losses in TOKEN_LOSSES if losses]
    if name == "token-mean":
        return sum(map(sum, trained)) / sum(map(len, trained))
    if name == "seq-mean-token-mean":
        return sum(sum(losses) / len(losses) for losses in trained) / len(trained)
    if name == "seq-mean-token-sum":
        return sum(map(sum, trained)) / len(trained)
    return sum(sum(losses) / MAX_TOKENS for losses in trained) / len(trained)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_weights_give_the_named_mean(name: str) -> None:
    counts = np.array([len(losses) for losses in TOKEN_LOSSES])
    weights = sequence_weights(counts, aggregation=name, max_tokens=MAX_TOKENS)
    flat = torch.tensor([loss for losses in TOKEN_LOSSES for loss in losses])
    assert float(aggregate(flat, torch.from_numpy(np.repeat(weights, counts)))) == pytest.approx(
        by_hand(name)
    )


def test_a_step_without_loss_tokens_has_finite_weights() -> None:
    for name in AGGREGATIONS:
        assert np.isfinite(sequence_weights(np.zeros(2), aggregation=name, max_tokens=4)).all()


def test_unknown_rules_and_missing_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="token-mean"):
        sequence_weights(np.ones(1), aggregation="mean")
    with pytest.raises(ConfigError, match="max_tokens"):
        sequence_weights(np.ones(1), aggregation="seq-mean-token-sum-norm")


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_components_have_their_own_denominators(name: str) -> None:
    """Adding branches leaves the weights of ordinary attempts alone."""
    main, branches = np.array([3, 1, 2]), np.array([4, 0, 4, 4, 4, 1])
    counts, components = np.concatenate([main, branches]), np.repeat([0, 1], [3, 6])
    weights = component_weights(counts, components, (1.0, 0.5), aggregation=name, max_tokens=MAX_TOKENS)
    rule = {"aggregation": name, "max_tokens": MAX_TOKENS}
    np.testing.assert_array_equal(weights[:3], sequence_weights(main, **rule))
    np.testing.assert_array_equal(weights[3:], 0.5 * sequence_weights(branches, **rule))


def test_equal_factors_do_not_join_components() -> None:
    weights = component_weights(
        np.array([1, 1, 1]), np.array([0, 1, 1]), (1.0, 1.0), aggregation="seq-mean-token-mean"
    )
    assert weights.tolist() == [1.0, 0.5, 0.5]
