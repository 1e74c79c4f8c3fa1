"""The figures of one training step, from what its rows left behind.

In: per-token values of every row of this rank. Out: plain numbers for people, over the rows of all ranks. How
far the trainer is from the engine (``mismatch_*``, ``behavior_kl``, ``effective_samples``) is measured before
the step's first update only; ``mismatch_*`` moreover on fresh tokens only, where the weights are equal and
any gap is the engine's.

Legend: N loss tokens of a row, S its sequences, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.trainers.objective import LossInputs, RowOutcome
from headrace.trainers.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecord:
    """What the metrics need of one row."""

    inputs: LossInputs
    outcome: RowOutcome
    policy_logprobs_N: torch.Tensor
    entropy_N: torch.Tensor
    before_update: bool
    """True for rows computed with the weights the step started from."""


def step_metrics(records: Sequence[RowRecord], ranks: Ranks = ALONE) -> dict[str, float]:
    """Empty when no row had a loss token."""
    tokens_NC = ranks.join(_joined([_token_columns(record) for record in records], columns=6))
    outcomes = [record.outcome for record in records]
    loss, kl, balance, divergence = ranks.totals(
        float(sum(outcome.loss.detach().double() for outcome in outcomes)),
        float(sum(outcome.kl.double() for outcome in outcomes)),
        float(sum(outcome.balance for outcome in outcomes if outcome.balance is not None)),
        float(sum(outcome.distillation for outcome in outcomes if outcome.distillation is not None)),
    )
    gaps, fresh, log_weights = _gaps(records)
    gaps_N2 = ranks.join(
        _joined([torch.stack([g, f], 1) for g, f in zip(gaps, fresh, strict=True)], columns=2)
    )
    log_weights_S = ranks.join(_joined(log_weights))
    if not len(tokens_NC):
        return {}
    entropy_N, lags_N, low_N, high_N, masked_N, capped_N = tokens_NC.unbind(1)
    return {
        "loss": loss,
        "kl": kl,
        # Where it is computed it is never 0: even use is 1.
        **({"expert_imbalance": balance} if balance else {}),
        # A student that is its teacher to the last bit has none to tell.
        **({"teacher_divergence": divergence} if divergence else {}),
        "entropy": _mean(entropy_N),
        "clip_fraction_low": _mean(low_N),
        "clip_fraction_high": _mean(high_N),
        "masked_fraction": _mean(masked_N),
        "capped_fraction": _mean(capped_N),
        "lag_mean": _mean(lags_N),
        "lag_max": float(lags_N.max()),
        **_behavior_metrics(gaps_N2[:, 0], gaps_N2[:, 1] > 0, log_weights_S),
    }


def _token_columns(record: RowRecord) -> torch.Tensor:
    """float64 [N, 6]: entropy, lag, clipped low, clipped high, masked, capped."""
    tokens = record.outcome.tokens
    columns = (
        record.entropy_N,
        record.inputs.lags_N,
        tokens.clipped_low_T,
        tokens.clipped_high_T,
        tokens.masked_T,
        record.outcome.capped_N,
    )
    return torch.stack([column.double() for column in columns], dim=1)


def _joined(parts: Sequence[torch.Tensor], *, columns: int | None = None) -> torch.Tensor:
    """float64, the rows of all parts; none where there are no parts."""
    empty = torch.zeros(0, dtype=torch.float64) if columns is None else torch.zeros(0, columns).double()
    return torch.cat(list(parts)) if parts else empty


def _gaps(
    records: Sequence[RowRecord],
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """By row: trainer against engine for each token [N] and whether it is fresh [N], and the log of each
    sequence's weight [S]."""
    gaps: list[torch.Tensor] = []
    fresh: list[torch.Tensor] = []
    log_weights: list[torch.Tensor] = []
    for record in records:
        row, prox_N = record.inputs, record.inputs.prox_logprobs_N
        if prox_N is None and not record.before_update:
            continue
        start_N = record.policy_logprobs_N if prox_N is None else prox_N
        gap_N = (start_N - row.behavior_logprobs_N).double()
        sums_S = gap_N.new_zeros(row.num_sequences).index_add_(0, row.sequence_N, gap_N)
        has_loss_S = torch.bincount(row.sequence_N, minlength=row.num_sequences) > 0
        gaps.append(gap_N)
        fresh.append((row.lags_N == 0).double())
        log_weights.append(sums_S[has_loss_S])
    return gaps, fresh, log_weights


def _behavior_metrics(
    gap_N: torch.Tensor, fresh_N: torch.Tensor, log_weights_S: torch.Tensor
) -> dict[str, float]:
    metrics = {
        "behavior_kl": _mean(torch.expm1(gap_N) - gap_N),
        "effective_samples": effective_sample_share(log_weights_S),
        "fresh_fraction": _mean(fresh_N),
    }
    if bool(fresh_N.any()):
        mismatch = gap_N[fresh_N].abs()
        metrics |= {
            "mismatch_mean": _mean(mismatch),
            "mismatch_p99": float(mismatch.kthvalue(math.ceil(0.99 * mismatch.numel())).values),
            "mismatch_max": float(mismatch.max()),
        }
    return metrics


def effective_sample_share(log_weights_S: torch.Tensor) -> float:
    """(sum w)^2 / (S sum w^2), between 1/S (one sequence decides) and 1 (all weigh the same)."""
    weights_S = (log_weights_S - log_weights_S.max()).exp()
    return float(weights_S.sum().square() / (weights_S.square().sum() * weights_S.numel()))


def _mean(values: torch.Tensor) -> float:
    return float(values.double().mean())
