"""The figures of one training step, from what its rows left behind.

In: per-token values of every row. Out: plain numbers for people. How far the trainer is from the engine
(``mismatch_*``, ``behavior_kl``, ``effective_samples``) is measured before the step's first update only;
``mismatch_*`` moreover on fresh tokens only, where the weights are equal and any gap is the engine's.

Legend: N loss tokens of a row, S its sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.trainers.objective import LossInputs, RowOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecord:
    """What the metrics need of one row."""

    inputs: LossInputs
    outcome: RowOutcome
    policy_logprobs_N: torch.Tensor
    entropy_N: torch.Tensor
    before_update: bool
    """True for rows computed with the weights the step started from."""


def step_metrics(records: Sequence[RowRecord]) -> dict[str, float]:
    """Empty when no row had a loss token."""
    if not records:
        return {}
    entropy_N = torch.cat([record.entropy_N for record in records])
    lags_N = torch.cat([record.inputs.lags_N for record in records]).double()
    tokens = [record.outcome.tokens for record in records]
    return {
        "loss": float(sum(record.outcome.loss.detach().double() for record in records)),
        "kl": float(sum(record.outcome.kl.double() for record in records)),
        "entropy": _mean(entropy_N),
        "clip_fraction_low": _mean(torch.cat([t.clipped_low_T for t in tokens])),
        "clip_fraction_high": _mean(torch.cat([t.clipped_high_T for t in tokens])),
        "masked_fraction": _mean(torch.cat([t.masked_T for t in tokens])),
        "capped_fraction": _mean(torch.cat([record.outcome.capped_N for record in records])),
        "lag_mean": _mean(lags_N),
        "lag_max": float(lags_N.max()),
        **_behavior_metrics(records),
    }


def _behavior_metrics(records: Sequence[RowRecord]) -> dict[str, float]:
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
        fresh.append(row.lags_N == 0)
        log_weights.append(sums_S[has_loss_S])
    gap_N, fresh_N = torch.cat(gaps), torch.cat(fresh)
    metrics = {
        "behavior_kl": _mean(torch.expm1(gap_N) - gap_N),
        "effective_samples": effective_sample_share(torch.cat(log_weights)),
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
