"""Policy-gradient losses, per token; aggregation and corrections are separate and named elsewhere.

In: [T] log-probabilities of the sampled tokens under the policy (with gradient) and under the anchor
(without; ``corrections`` says which policy that is), and their advantages. Out: [T] losses to minimise,
and which tokens the clip touched. Nothing here averages, so a row of any size gives the same values.

PPO: arXiv 1707.06347. Asymmetric clip: DAPO, arXiv 2503.14476. Dual clip: arXiv 1912.09729. CISPO: arXiv
2506.13585. GSPO: arXiv 2507.18071. Decoupled PPO (arXiv 2110.00641) is ``ppo_clip`` anchored at prox and
weighted by ``corrections.truncated_weights``.

Legend: T loss tokens of one row, S sequences of that row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.algos.corrections import MAX_LOG_RATIO, ratio
from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss per token, and what the clip did to each."""

    loss_T: torch.Tensor
    clipped_low_T: torch.Tensor
    """bool: the ratio was below the range, on a side where the clip acts."""
    clipped_high_T: torch.Tensor
    masked_T: torch.Tensor
    """bool: the clip left the token no gradient."""


class PolicyLoss(Protocol):
    def __call__(
        self,
        *,
        policy_logprobs_T: torch.Tensor,
        anchor_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        sequence_T: torch.Tensor,
        num_sequences: int,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None,
    ) -> TokenLoss: ...


def ppo_clip(
    *,
    policy_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    sequence_T: torch.Tensor | None = None,
    num_sequences: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A); with ``dual_clip`` c, at most -c A where A < 0."""
    ratio_T = ratio(policy_logprobs_T, anchor_logprobs_T)
    return _clipped(ratio_T, advantages_T, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def cispo(
    *,
    policy_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    sequence_T: torch.Tensor | None = None,
    num_sequences: int | None = None,
    clip_low: float = 1.0,
    clip_high: float = 5.0,
    dual_clip: float | None = None,
) -> TokenLoss:
    """-sg(clip(r, 1 - low, 1 + high)) A log policy: the weight is clipped, no token loses its gradient."""
    _refuse_dual_clip("cispo", dual_clip)
    ratio_T = ratio(policy_logprobs_T, anchor_logprobs_T).detach()
    weight_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(
        loss_T=-weight_T * advantages_T * policy_logprobs_T,
        clipped_low_T=ratio_T < 1 - clip_low,
        clipped_high_T=ratio_T > 1 + clip_high,
        masked_T=torch.zeros_like(ratio_T, dtype=torch.bool),
    )


def gspo(
    *,
    policy_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    sequence_T: torch.Tensor,
    num_sequences: int,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO's clip on s = exp(mean over the sequence of log r), in the token form sg(s) policy / sg(policy).

    ``sequence_T`` numbers each token's sequence from 0; every token of a sequence must be in the row.
    """
    _refuse_dual_clip("gspo", dual_clip)
    gap_T = (policy_logprobs_T - anchor_logprobs_T).detach()
    sums_S = gap_T.new_zeros(num_sequences).index_add_(0, sequence_T, gap_T)
    counts_S = torch.bincount(sequence_T, minlength=num_sequences).clamp(min=1)
    log_s_T = (sums_S / counts_S)[sequence_T].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = (log_s_T + policy_logprobs_T - policy_logprobs_T.detach()).exp()
    return _clipped(ratio_T, advantages_T, clip_low=clip_low, clip_high=clip_high, dual_clip=None)


LOSSES: dict[str, PolicyLoss] = {"ppo": ppo_clip, "decoupled": ppo_clip, "cispo": cispo, "gspo": gspo}

DEFAULT_CLIPS: dict[str, tuple[float, float]] = {
    "ppo": (0.2, 0.28),
    "decoupled": (0.2, 0.28),
    "cispo": (1.0, 5.0),
    "gspo": (3e-4, 4e-4),
}
"""(low, high) of each loss, as its authors or their successors use it."""


def check_clips(loss: str, *, clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    """Raise ConfigError for a range that is empty or a dual clip the loss does not have."""
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ConfigError(
            f"clip_low must be between 0 and 1 and clip_high at least 0, not {clip_low} and {clip_high}"
        )
    if dual_clip is not None:
        if LOSSES[loss] is not ppo_clip:
            _refuse_dual_clip(loss, dual_clip)
        if dual_clip <= 1 + clip_high:
            raise ConfigError(f"dual_clip must be above 1 + clip_high ({1 + clip_high}), not {dual_clip}")


def _refuse_dual_clip(loss: str, dual_clip: float | None) -> None:
    if dual_clip is not None:
        raise ConfigError(
            f"dual_clip has no meaning for loss {loss!r}: leave it unset, or use ppo or decoupled"
        )


def _clipped(
    ratio_T: torch.Tensor,
    advantages_T: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = torch.maximum(-ratio_T * advantages_T, -clipped_T * advantages_T)
    low_T = (advantages_T < 0) & (ratio_T < 1 - clip_low)
    high_T = (advantages_T > 0) & (ratio_T > 1 + clip_high)
    if dual_clip is not None:
        beyond_T = (advantages_T < 0) & (ratio_T > dual_clip)
        loss_T = torch.where(beyond_T, -dual_clip * advantages_T, loss_T)
        high_T = high_T | beyond_T
    return TokenLoss(loss_T=loss_T, clipped_low_T=low_T, clipped_high_T=high_T, masked_T=low_T | high_T)
