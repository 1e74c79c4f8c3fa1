"""Per-token losses -> one number, by a rule that has a name because it changes results.

In: how many loss tokens each sequence of a whole optimizer step has. Out: the weight of every token of
each sequence. Since the weights are known before the first backward, a step may be split over any
number of rows and the summed gradients are the same. A loss of several components, such as ordinary attempts and
branches, is the weighted sum of what the rule makes of each alone, with denominators of their own.

Legend: S sequences of the optimizer step, T tokens of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch

from headrace.errors import ConfigError

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def sequence_weights(
    num_loss_tokens_S: np.ndarray, *, aggregation: Aggregation, max_tokens: int | None = None
) -> np.ndarray:
    """float64 [S], the weight of each loss token of a sequence; sequences without loss tokens count nowhere.

    ``max_tokens`` is the constant length of ``seq-mean-token-sum-norm`` (Dr.GRPO, arXiv 2503.20783).
    """
    check_aggregation(aggregation, max_tokens=max_tokens)
    counts_S = np.asarray(num_loss_tokens_S, dtype=np.float64)
    num_sequences = max(int(np.count_nonzero(counts_S)), 1)
    if aggregation == "token-mean":
        return np.full_like(counts_S, 1.0 / max(float(counts_S.sum()), 1.0))
    if aggregation == "seq-mean-token-mean":
        return 1.0 / (num_sequences * np.maximum(counts_S, 1.0))
    if aggregation == "seq-mean-token-sum":
        return np.full_like(counts_S, 1.0 / num_sequences)
    assert max_tokens is not None
    return np.full_like(counts_S, 1.0 / (num_sequences * max_tokens))


def component_weights(
    num_loss_tokens_S: np.ndarray,
    components_S: np.ndarray,
    factors: Sequence[float],
    *,
    aggregation: Aggregation,
    max_tokens: int | None = None,
) -> np.ndarray:
    """``sequence_weights`` of each component by itself, times its factor in the loss. ``components_S`` numbers the
    component of each sequence."""
    weights_S = np.zeros(len(components_S))
    for component, factor in enumerate(factors):
        mine_S = components_S == component
        weights_S[mine_S] = factor * sequence_weights(
            num_loss_tokens_S[mine_S], aggregation=aggregation, max_tokens=max_tokens
        )
    return weights_S


def check_aggregation(aggregation: str, *, max_tokens: int | None) -> None:
    """Raise ConfigError unless the rule exists and has the length it needs."""
    if aggregation not in AGGREGATIONS:
        raise ConfigError(f"aggregation {aggregation!r} is unknown: use one of {', '.join(AGGREGATIONS)}")
    if aggregation == "seq-mean-token-sum-norm" and (max_tokens is None or max_tokens < 1):
        raise ConfigError(
            "aggregation 'seq-mean-token-sum-norm' divides by a constant length: set max_tokens to the "
            "longest completion allowed"
        )


def aggregate(values_T: torch.Tensor, weights_T: torch.Tensor) -> torch.Tensor:
    """The row's share of the step's loss."""
    return (values_T * weights_T).sum()
