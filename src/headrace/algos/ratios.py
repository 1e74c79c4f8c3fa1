"""Log-probabilities of a row's tokens and the sums over its sequences that losses and corrections share.

A sample always lies whole in one row (``data.packing``), so a value of a whole sequence can be computed from the
row alone. Log ratios are kept within ``MAX_LOG_RATIO``, so that every ratio is finite.

Legend: T loss tokens of one row, S sequences of that row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped here: e^20 is far outside every clip range, and e^89 is infinite in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """What a policy loss looks at."""

    policy_T: torch.Tensor
    """Log-probabilities with gradient; all others are without."""
    anchor_T: torch.Tensor
    behavior_T: torch.Tensor
    advantages_T: torch.Tensor
    sequence_T: torch.Tensor
    """int64, the number of each token's sequence from 0; every token of a sequence is in the row."""
    num_sequences: int

    @property
    def ratio_T(self) -> torch.Tensor:
        """policy / anchor, with gradient."""
        return ratio(self.policy_T, self.anchor_T)

    @property
    def behavior_ratio_T(self) -> torch.Tensor:
        """policy / behavior, detached."""
        return ratio(self.policy_T, self.behavior_T).detach()


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss per token, and what the loss's own bounds did to each."""

    loss_T: torch.Tensor
    clipped_low_T: torch.Tensor
    """bool: the ratio was below the range, on a side where the bound acts."""
    clipped_high_T: torch.Tensor
    masked_T: torch.Tensor
    """bool: the bound left the token no policy gradient."""


def ratio(numerator_T: torch.Tensor, denominator_T: torch.Tensor) -> torch.Tensor:
    """exp(numerator - denominator) of log-probabilities, kept finite."""
    return bounded(numerator_T - denominator_T).exp()


def bounded(log_ratio_T: torch.Tensor) -> torch.Tensor:
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sums(values_T: torch.Tensor, sequence_T: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """[S]; 0 for a sequence without loss tokens."""
    return values_T.new_zeros(num_sequences).index_add_(0, sequence_T, values_T)


def sequence_means(values_T: torch.Tensor, sequence_T: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """[S]; 0 for a sequence without loss tokens."""
    counts_S = torch.bincount(sequence_T, minlength=num_sequences).clamp(min=1)
    return sequence_sums(values_T, sequence_T, num_sequences) / counts_S


def sequence_maxima(values_T: torch.Tensor, sequence_T: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """[S] of values of at least 0; 0 for a sequence without loss tokens."""
    return values_T.new_zeros(num_sequences).scatter_reduce_(0, sequence_T, values_T, "amax")


def nothing(values_T: torch.Tensor) -> torch.Tensor:
    """bool, false everywhere."""
    return torch.zeros_like(values_T, dtype=torch.bool)
