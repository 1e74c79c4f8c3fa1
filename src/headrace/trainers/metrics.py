"""The figures of one training step, from what its rows left behind.

In: per-token values of every row of this rank. Out: plain numbers for people, over the rows of all ranks. How
far the trainer is from the engine (``mismatch_*``, ``behavior_kl``, ``effective_samples``) is measured before
the step's first update only; ``mismatch_*`` moreover on fresh tokens only, where the weights are equal and
any gap is the engine's. ``masked_by_*`` say which share of the tokens each cause left out, ``lag_share_*`` how the
tokens' lags are spread, ``version_span_*`` over how many versions a sequence was sampled.

Legend: N loss tokens of a row, S its sequences, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.trainers.objective import LossInputs, Objective, RowOutcome
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
    kept_mass_N: torch.Tensor | None = None
    """As in ``logprobs.TokenValues``."""


LAG_BUCKETS = ((0, 0), (1, 1), (2, 3), (4, 7), (8, None))
"""First and last lag of each share that is told."""


def step_metrics(
    records: Sequence[RowRecord], objective: Objective, ranks: Ranks = ALONE, *, num_updates: int = 1
) -> dict[str, float]:
    """Empty when no row had a loss token. Each of ``num_updates`` minibatches is normalised by itself, so of the losses
    the mean over them is told."""
    causes = objective.causes
    columns = [_token_columns(record, causes) for record in records]
    tokens_NC = ranks.join(_joined(columns, columns=6 + len(causes)))
    outcomes = [record.outcome for record in records]
    names = objective.component_names
    sums = ranks.totals(
        float(sum(outcome.loss.detach().double() for outcome in outcomes)),
        float(sum(outcome.balance for outcome in outcomes if outcome.balance is not None)),
        float(sum(outcome.distillation for outcome in outcomes if outcome.distillation is not None)),
        *(float(sum(o.values[name].double() for o in outcomes if name in o.values)) for name in names),
    )
    loss, balance, divergence, *values = (total / num_updates for total in sums)
    spans_S = ranks.join(_joined([_version_spans(record.inputs) for record in records]))
    behavior = behavior_metrics(starts(records), ranks)
    if not len(tokens_NC):
        return {}
    entropy_N, lags_N, low_N, high_N, capped_N, mass_N, *masked = tokens_NC.unbind(1)
    return {
        "loss": loss,
        "kl": 0.0,
        **{name: value for name, value in zip(names, values, strict=True) if name != "policy"},
        # Where it is computed it is never 0: even use is 1.
        **({"expert_imbalance": balance} if balance else {}),
        # A student that is its teacher to the last bit has none to tell.
        **({"teacher_divergence": divergence} if divergence else {}),
        "entropy": _mean(entropy_N),
        "clip_fraction_low": _mean(low_N),
        "clip_fraction_high": _mean(high_N),
        "masked_fraction": _mean(torch.stack(masked).any(0)),
        **{f"masked_by_{cause}": _mean(part_N) for cause, part_N in zip(causes, masked, strict=True)},
        "capped_fraction": _mean(capped_N),
        **_lag_metrics(lags_N),
        "version_span_mean": _mean(spans_S),
        "version_span_max": float(spans_S.max()),
        **_kept_metrics(mass_N),
        **behavior,
    }


def _token_columns(record: RowRecord, causes: Sequence[str]) -> torch.Tensor:
    """float64 [N, 6 + causes]: entropy, lag, clipped low, clipped high, capped, mass of the kept set, masked by each
    cause."""
    tokens, mass_N = record.outcome.tokens, record.kept_mass_N
    columns = (
        record.entropy_N,
        record.inputs.lags_N,
        tokens.clipped_low_T,
        tokens.clipped_high_T,
        record.outcome.capped_N,
        torch.full_like(record.entropy_N, torch.nan) if mass_N is None else mass_N,
        *(record.outcome.masked[cause] for cause in causes),
    )
    return torch.stack([column.double() for column in columns], dim=1)


def _kept_metrics(mass_N: torch.Tensor) -> dict[str, float]:
    """How much of the distribution top-k, top-p and min-p left, over the tokens that were drawn from a cut one."""
    cut_N = ~mass_N.isnan()
    if not bool(cut_N.any()):
        return {}
    return {"kept_mass": _mean(mass_N[cut_N]), "truncated_fraction": _mean(cut_N)}


def _lag_metrics(lags_N: torch.Tensor) -> dict[str, float]:
    metrics = {"lag_mean": _mean(lags_N), "lag_max": float(lags_N.max())}
    for first, last in LAG_BUCKETS:
        inside_N = (lags_N >= first) & (lags_N <= (math.inf if last is None else last))
        name = f"{first}" if first == last else f"{first}_up" if last is None else f"{first}_{last}"
        metrics[f"lag_share_{name}"] = _mean(inside_N)
    return metrics


def _version_spans(row: LossInputs) -> torch.Tensor:
    """float64 [S] of sequences with loss tokens: newest version less oldest."""
    lags_N = row.lags_N.double()
    oldest_S = lags_N.new_full((row.num_sequences,), -math.inf).scatter_reduce_(
        0, row.sequence_N, lags_N, "amax"
    )
    newest_S = lags_N.new_full((row.num_sequences,), math.inf).scatter_reduce_(
        0, row.sequence_N, lags_N, "amin"
    )
    return (oldest_S - newest_S)[oldest_S.isfinite()]


def _joined(parts: Sequence[torch.Tensor], *, columns: int | None = None) -> torch.Tensor:
    """float64, the rows of all parts; none where there are no parts."""
    empty = torch.zeros(0, dtype=torch.float64) if columns is None else torch.zeros(0, columns).double()
    return torch.cat(list(parts)) if parts else empty


def starts(records: Sequence[RowRecord]) -> list[tuple[torch.Tensor, LossInputs]]:
    """Log-probabilities [N] of the weights the step started from, of the rows for which they are known."""
    known = [(r.inputs.prox_logprobs_N, r) for r in records]
    return [
        (record.policy_logprobs_N if prox_N is None else prox_N, record.inputs)
        for prox_N, record in known
        if prox_N is not None or record.before_update
    ]


def behavior_metrics(
    starts: Sequence[tuple[torch.Tensor, LossInputs]], ranks: Ranks = ALONE
) -> dict[str, float]:
    """How far the weights a step starts from are from those that sampled its tokens; empty without tokens."""
    gaps: list[torch.Tensor] = []
    log_weights: list[torch.Tensor] = []
    for start_N, row in starts:
        gap_N = (start_N - row.behavior_logprobs_N).double()
        sums_S = gap_N.new_zeros(row.num_sequences).index_add_(0, row.sequence_N, gap_N)
        has_loss_S = torch.bincount(row.sequence_N, minlength=row.num_sequences) > 0
        gaps.append(torch.stack([gap_N, (row.lags_N == 0).double()], 1))
        log_weights.append(sums_S[has_loss_S])
    gaps_N2 = ranks.join(_joined(gaps, columns=2))
    log_weights_S = ranks.join(_joined(log_weights))
    if not len(gaps_N2):
        return {}
    gap_N, fresh_N = gaps_N2[:, 0], gaps_N2[:, 1] > 0
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
