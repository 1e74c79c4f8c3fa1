"""Losses whose clip takes the gradient from tokens that have moved far enough: PPO, GSPO, GMPO.

Legend: T loss tokens of one row.
"""

from __future__ import annotations

import torch

from headrace.algos.ratios import LossTokens, TokenLoss, bounded, sequence_means


def ppo(tokens: LossTokens, *, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> TokenLoss:
    """-min(u A, clip(u, 1 - low, 1 + high) A); with ``dual_clip`` c above 0, at most -c A where A < 0."""
    return _clipped(tokens.ratio_T, tokens.advantages_T, clip_low, clip_high, dual_clip)


def gspo(tokens: LossTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's clip on s = exp(mean over the sequence of log u), in the token form sg(s) policy / sg(policy)."""
    gap_T = (tokens.policy_T - tokens.anchor_T).detach()
    log_s_T = sequence_means(gap_T, tokens.sequence_T, tokens.num_sequences)[tokens.sequence_T]
    ratio_T = (bounded(log_s_T) + tokens.policy_T - tokens.policy_T.detach()).exp()
    return _clipped(ratio_T, tokens.advantages_T, clip_low, clip_high, 0.0)


def gmpo(tokens: LossTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """-A times the geometric mean of the sequence's ratios, each clipped at e^-low or e^high on the side where
    the advantage pushes; a clipped token keeps its share of the mean and loses its gradient.

    In the token form, whose mean over a sequence is the sequence's loss.
    """
    gap_T, advantages_T = bounded(tokens.policy_T - tokens.anchor_T), tokens.advantages_T
    low_T = (advantages_T < 0) & (gap_T < -clip_low)
    high_T = (advantages_T > 0) & (gap_T > clip_high)
    clipped_T = torch.where(low_T, -clip_low, torch.where(high_T, clip_high, gap_T))
    means_S = sequence_means(clipped_T.detach(), tokens.sequence_T, tokens.num_sequences)
    ratio_T = (means_S[tokens.sequence_T] + clipped_T - clipped_T.detach()).exp()
    return TokenLoss(-ratio_T * advantages_T, low_T, high_T, low_T | high_T)


def _clipped(
    ratio_T: torch.Tensor, advantages_T: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float
) -> TokenLoss:
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = torch.maximum(-ratio_T * advantages_T, -clipped_T * advantages_T)
    low_T = (advantages_T < 0) & (ratio_T < 1 - clip_low)
    high_T = (advantages_T > 0) & (ratio_T > 1 + clip_high)
    if dual_clip > 0:
        beyond_T = (advantages_T < 0) & (ratio_T > dual_clip)
        loss_T = torch.where(beyond_T, -dual_clip * advantages_T, loss_T)
        high_T = high_T | beyond_T
    return TokenLoss(loss_T, low_T, high_T, low_T | high_T)
