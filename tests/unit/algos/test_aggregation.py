from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.algos.aggregation import AGGREGATIONS, aggregate, sequence_weights
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
