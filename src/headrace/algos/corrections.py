"""How much a token counts, given how far prox had moved from the policy it was sampled from.

In: log-probabilities of a row's tokens under the three policies. Out: [T] detached weights, or which tokens a
filter keeps; a weight is 0 where its rule leaves a token out. Formulas, defaults and sources are in
``catalog.CORRECTIONS``. What is left out stays in the loss's denominator: a batch of which half is left out
takes half a step. ``m2po_cutoff`` alone needs the whole batch.

Legend: T loss tokens of one row, S its sequences, B tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.algos.ratios import bounded, nothing, sequence_maxima, sequence_means, sequence_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionTokens:
    """What corrections look at; nothing of it has a gradient."""

    policy_T: torch.Tensor
    prox_T: torch.Tensor
    behavior_T: torch.Tensor
    advantages_T: torch.Tensor
    sequence_T: torch.Tensor
    num_sequences: int

    @property
    def log_rho_T(self) -> torch.Tensor:
        """log prox - log behavior."""
        return self.prox_T - self.behavior_T

    def sequence_log_rho_T(self) -> torch.Tensor:
        """Its sum over each token's sequence."""
        return sequence_sums(self.log_rho_T, self.sequence_T, self.num_sequences)[self.sequence_T]

    def sequence_mean_T(self, values_T: torch.Tensor) -> torch.Tensor:
        return sequence_means(values_T, self.sequence_T, self.num_sequences)[self.sequence_T]


@dataclass(frozen=True, slots=True)
class TokenWeights:
    weights_T: torch.Tensor
    capped_T: torch.Tensor
    """bool: the weight was cut at its cap."""
    masked_T: torch.Tensor
    """bool: the weight is 0 because the ratio was outside its bounds."""


def truncated(log_rho_T: torch.Tensor, cap: float) -> TokenWeights:
    """min(rho, cap)."""
    rho_T = bounded(log_rho_T).exp()
    return TokenWeights(rho_T.clamp(max=cap), rho_T >= cap, nothing(rho_T))


def banded(log_rho_T: torch.Tensor, low: float, high: float) -> TokenWeights:
    """rho from ``low`` to ``high``, else 0."""
    rho_T = bounded(log_rho_T).exp()
    masked_T = (rho_T < low) | (rho_T > high)
    return TokenWeights(rho_T.masked_fill(masked_T, 0.0), nothing(rho_T), masked_T)


def tis(tokens: CorrectionTokens, *, cap: float) -> TokenWeights:
    return truncated(tokens.log_rho_T, cap)


def icepop(tokens: CorrectionTokens, *, low: float, high: float) -> TokenWeights:
    return banded(tokens.log_rho_T, low, high)


def mis(tokens: CorrectionTokens, *, cap: float) -> TokenWeights:
    return banded(tokens.log_rho_T, 0.0, cap)


def seq_tis(tokens: CorrectionTokens, *, cap: float) -> TokenWeights:
    return truncated(tokens.sequence_log_rho_T(), cap)


def seq_mis(tokens: CorrectionTokens, *, cap: float) -> TokenWeights:
    return banded(tokens.sequence_log_rho_T(), 0.0, cap)


WEIGHTS: dict[str, Callable[..., TokenWeights]] = {
    "tis": tis,
    "icepop": icepop,
    "mis": mis,
    "seq-tis": seq_tis,
    "seq-mis": seq_mis,
}


def geo_filter(tokens: CorrectionTokens, *, low: float, high: float) -> torch.Tensor:
    """bool [T]: the geometric mean of the sequence's rho is within the band."""
    mean_T = bounded(tokens.sequence_mean_T(tokens.log_rho_T)).exp()
    return (mean_T >= low) & (mean_T <= high)


def k3_filter(tokens: CorrectionTokens, *, limit: float) -> torch.Tensor:
    log_rho_T = bounded(tokens.log_rho_T)
    return tokens.sequence_mean_T(torch.expm1(log_rho_T) - log_rho_T) <= limit


def max_k2_filter(tokens: CorrectionTokens, *, limit: float) -> torch.Tensor:
    halves_T = tokens.log_rho_T.square() / 2
    return sequence_maxima(halves_T, tokens.sequence_T, tokens.num_sequences)[tokens.sequence_T] <= limit


def opsm(tokens: CorrectionTokens, *, delta: float) -> torch.Tensor:
    """False on tokens that are to become less likely in sequences the policy has already moved away from."""
    gap_T = tokens.sequence_mean_T(tokens.behavior_T - tokens.policy_T)
    return (tokens.advantages_T >= 0) | (gap_T <= delta)


def m2po_cutoff(log_rho_B: torch.Tensor, *, tau: float) -> float:
    """The square of log rho from which tokens are left out, so that the mean of the others' is below ``tau``.

    Tokens of equal squares stay or go together, so the outcome does not depend on their order.
    """
    squares_B = log_rho_B.double().square().sort().values
    means_B = squares_B.cumsum(0) / torch.arange(1, len(squares_B) + 1, device=squares_B.device)
    num_kept = int((means_B < tau).sum())
    return float("inf") if num_kept == len(squares_B) else float(squares_B[num_kept])


def m2po(tokens: CorrectionTokens, *, cutoff: float) -> torch.Tensor:
    return tokens.log_rho_T.double().square() < cutoff


FILTERS: dict[str, Callable[..., torch.Tensor]] = {
    "geo-filter": geo_filter,
    "k3-filter": k3_filter,
    "max-k2-filter": max_k2_filter,
    "opsm": opsm,
    "m2po": m2po,
}


def interpolated_prox(policy_T: torch.Tensor, behavior_T: torch.Tensor, lags_T: torch.Tensor) -> torch.Tensor:
    """log behavior + lag / (lag + 1) (log policy - log behavior): between the version that sampled the token and
    the one being made, where prox is one version before the end."""
    lags_T = lags_T.to(policy_T.dtype)
    share_T = lags_T / (lags_T + 1)
    return behavior_T + share_T * (policy_T - behavior_T)
