"""The figures of one training step, from what its rows left behind.

In: per-token values of every row of this rank. Out: plain numbers for people, over the rows of all ranks. How
far the trainer is from the engine (``mismatch_*``, ``behavior_kl``, ``effective_samples``) is measured before
the step's first update only; ``mismatch_*`` moreover on fresh tokens only, where the weights are equal and
any gap is the engine's. ``masked_by_*`` say which share of the tokens each cause left out, ``lag_share_*`` how the
tokens' lags are spread, ``version_span_*`` over how many versions a sequence was sampled. A GPU has nothing to do
meanwhile, so rows are put together first, and most launches are for all of them at once.

Legend: N loss tokens of a row, S its sequences, C columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
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


_NOTHING_S = torch.zeros(0, dtype=torch.float64)
LAG_BUCKETS = ((0, 0), (1, 1), (2, 3), (4, 7), (8, None))
"""First and last lag of each share that is told."""


def step_metrics(
    records: Sequence[RowRecord],
    objective: Objective,
    ranks: Ranks = ALONE,
    *,
    behavior: Mapping[str, float],
    num_updates: int = 1,
) -> dict[str, float]:
    """Empty when no row had a loss token. ``behavior`` is what ``behavior_metrics`` said of the same step. Each of
    ``num_updates`` minibatches is normalised by itself, so of the losses the mean over them is told."""
    causes = objective.causes
    tokens_NC = ranks.join(_token_columns(records, causes))
    outcomes = [record.outcome for record in records]
    names = objective.component_names
    sums = ranks.totals(
        total_of(outcome.loss.detach() for outcome in outcomes),
        total_of(outcome.balance for outcome in outcomes),
        total_of(outcome.distillation for outcome in outcomes),
        *(total_of(outcome.values.get(name) for outcome in outcomes) for name in names),
    )
    loss, balance, divergence, *values = (total / num_updates for total in sums)
    spans_S = ranks.join(_version_spans([record.inputs for record in records]))
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


def _token_columns(records: Sequence[RowRecord], causes: Sequence[str]) -> torch.Tensor:
    """float64 [N, 6 + causes] of all rows: entropy, lag, clipped low, clipped high, capped, mass of the kept set,
    masked by each cause."""
    if not records:
        return torch.zeros(0, 6 + len(causes), dtype=torch.float64)

    by_row = [
        (
            record.entropy_N,
            record.inputs.lags_N,
            record.outcome.tokens.clipped_low_T,
            record.outcome.tokens.clipped_high_T,
            record.outcome.capped_N,
            _kept_mass(record),
            *(record.outcome.masked[cause] for cause in causes),
        )
        for record in records
    ]
    return torch.stack([torch.cat(column).double() for column in zip(*by_row, strict=True)], dim=1)


def _kept_mass(record: RowRecord) -> torch.Tensor:
    mass_N = record.kept_mass_N
    return torch.full_like(record.entropy_N, torch.nan) if mass_N is None else mass_N


def total_of(values: Iterable[torch.Tensor | None]) -> float:
    """Of single numbers, those that are there."""
    known = [value for value in values if value is not None]
    return float(torch.stack(known).double().sum()) if known else 0.0


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


def _version_spans(rows: Sequence[LossInputs]) -> torch.Tensor:
    """float64 [S] of sequences with loss tokens: newest version less oldest."""
    if not rows:
        return _NOTHING_S
    lags_N = torch.cat([row.lags_N for row in rows]).double()
    sequence_N, num_sequences = _numbered(rows)
    oldest_S, newest_S = (
        lags_N.new_full((num_sequences,), start).scatter_reduce_(0, sequence_N, lags_N, which)
        for start, which in ((-math.inf, "amax"), (math.inf, "amin"))
    )
    return (oldest_S - newest_S)[oldest_S.isfinite()]


def _numbered(rows: Sequence[LossInputs]) -> tuple[torch.Tensor, int]:
    """The sequence of each token, counted through all rows, and how many there are."""
    *firsts, num_sequences = itertools.accumulate((row.num_sequences for row in rows), initial=0)
    pairs = zip(rows, firsts, strict=True)
    return torch.cat([row.sequence_N + first for row, first in pairs]), num_sequences


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
    gaps_N2, log_weights_S = (ranks.join(part) for part in _gaps(starts))
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


def _gaps(starts: Sequence[tuple[torch.Tensor, LossInputs]]) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [N, 2]: of each token how much likelier it is than when it was sampled, and 1 where that was by the same
    weights. float64 [S]: of each sequence with loss tokens the sum of the former."""
    if not starts:
        return torch.zeros(0, 2, dtype=torch.float64), _NOTHING_S
    rows = [row for _, row in starts]
    known_N = torch.cat([start_N for start_N, _ in starts])
    gap_N = (known_N - torch.cat([row.behavior_logprobs_N for row in rows])).double()
    fresh_N = (torch.cat([row.lags_N for row in rows]) == 0).double()
    sequence_N, num_sequences = _numbered(rows)
    sums_S = gap_N.new_zeros(num_sequences).index_add_(0, sequence_N, gap_N)
    has_loss_S = torch.zeros_like(sums_S, dtype=torch.bool).index_fill_(0, sequence_N, True)
    return torch.stack([gap_N, fresh_N], 1), sums_S[has_loss_S]


def effective_sample_share(log_weights_S: torch.Tensor) -> float:
    """(sum w)^2 / (S sum w^2), between 1/S (one sequence decides) and 1 (all weigh the same)."""
    weights_S = (log_weights_S - log_weights_S.max()).exp()
    return float(weights_S.sum().square() / (weights_S.square().sum() * weights_S.numel()))


def _mean(values: torch.Tensor) -> float:
    return float(values.double().mean())
