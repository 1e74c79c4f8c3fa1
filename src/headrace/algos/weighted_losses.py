"""Losses that weigh each token's policy gradient instead of clipping it away: CISPO, GIPO, AIPO, VESPO and others.

Legend: T loss tokens of one row.
"""

from __future__ import annotations

import torch

from headrace.algos.ratios import LossTokens, TokenLoss, bounded, nothing, sequence_sums


def cispo(tokens: LossTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """-sg(clip(u, 1 - low, 1 + high)) A log policy: the weight is clipped, no token loses its gradient."""
    ratio_T = tokens.ratio_T.detach()
    weight_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return _weighted(tokens, weight_T, low_T=ratio_T < 1 - clip_low, high_T=ratio_T > 1 + clip_high)


def aipo(tokens: LossTokens, *, cap: float) -> TokenLoss:
    """-sg(min(r, cap)) A log policy."""
    ratio_T = tokens.behavior_ratio_T
    return _weighted(tokens, ratio_T.clamp(max=cap), high_T=ratio_T > cap)


def sapo(tokens: LossTokens, *, tau_pos: float, tau_neg: float) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (u - 1)): the gradient fades away from u = 1 instead of ending."""
    ratio_T, advantages_T = tokens.ratio_T, tokens.advantages_T
    tau_T = torch.full_like(advantages_T, tau_neg).masked_fill(advantages_T > 0, tau_pos)
    loss_T = -advantages_T * 4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1))
    return TokenLoss(loss_T, nothing(loss_T), nothing(loss_T), nothing(loss_T))


def gipo(tokens: LossTokens, *, sigma: float) -> TokenLoss:
    """-sg(exp(-(log u)^2 / (2 sigma^2))) u A: the further a ratio is from 1, on either side, the less it counts."""
    ratio_T = tokens.ratio_T
    weight_T = (ratio_T.detach().log() / sigma).square().mul(-0.5).exp()
    loss_T = -weight_T * ratio_T * tokens.advantages_T
    return TokenLoss(loss_T, nothing(loss_T), nothing(loss_T), nothing(loss_T))


def aspo(tokens: LossTokens, *, clip_low: float, clip_high: float, cap: float) -> TokenLoss:
    """Where A > 0 the weight is 1 / u: a token that is still unlikely is pushed more, not less. Tokens beyond
    PPO's clip are left out; weights above ``cap`` are cut and keep their gradient."""
    ratio_T, advantages_T = tokens.ratio_T.detach(), tokens.advantages_T
    low_T = (advantages_T < 0) & (ratio_T < 1 - clip_low)
    high_T = (advantages_T > 0) & (ratio_T > 1 + clip_high)
    weight_T = torch.where(advantages_T > 0, 1 / ratio_T, ratio_T).clamp(max=cap)
    return _weighted(tokens, weight_T, low_T=low_T, high_T=high_T, masked_T=low_T | high_T)


def dppo_tv(tokens: LossTokens, *, delta: float, cap: float, penalty: float) -> TokenLoss:
    """-sg(min(r, cap)) A log policy, except on tokens whose probability has already moved by more than ``delta``
    in the direction of the advantage; the squared log ratio counts on all."""
    moved_T = (tokens.policy_T.exp() - tokens.behavior_T.exp()).detach()
    low_T = (tokens.advantages_T < 0) & (moved_T < -delta)
    high_T = (tokens.advantages_T > 0) & (moved_T > delta)
    weight_T = tokens.behavior_ratio_T.clamp(max=cap)
    loss = _weighted(tokens, weight_T, low_T=low_T, high_T=high_T, masked_T=low_T | high_T)
    if penalty == 0.0:
        return loss
    squares_T = (tokens.policy_T - tokens.behavior_T).square()
    return TokenLoss(loss.loss_T + penalty * squares_T, low_T, high_T, loss.masked_T)


def vespo(
    tokens: LossTokens, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float
) -> TokenLoss:
    """-sg(phi(w)) A log policy with phi(w) = e^l w^k e^(-l w), 1 at w = 1, and w the sequence's ratio."""
    gap_T = bounded(tokens.policy_T - tokens.behavior_T).detach()
    log_w_S = bounded(sequence_sums(gap_T, tokens.sequence_T, tokens.num_sequences))
    log_w_T = log_w_S[tokens.sequence_T]
    is_good_T = tokens.advantages_T >= 0
    k_T = torch.full_like(log_w_T, k_neg).masked_fill(is_good_T, k_pos)
    lambda_T = torch.full_like(log_w_T, lambda_neg).masked_fill(is_good_T, lambda_pos)
    weight_T = (lambda_T + k_T * log_w_T - lambda_T * log_w_T.exp()).exp()
    return _weighted(tokens, weight_T)


def dro(tokens: LossTokens, *, beta: float) -> TokenLoss:
    """-(A log policy - beta/2 (log r)^2)."""
    loss_T = -tokens.advantages_T * tokens.policy_T
    loss_T = loss_T + beta / 2 * (tokens.policy_T - tokens.behavior_T).square()
    return TokenLoss(loss_T, nothing(loss_T), nothing(loss_T), nothing(loss_T))


def _weighted(
    tokens: LossTokens,
    weight_T: torch.Tensor,
    *,
    low_T: torch.Tensor | None = None,
    high_T: torch.Tensor | None = None,
    masked_T: torch.Tensor | None = None,
) -> TokenLoss:
    """-weight A log policy on tokens that are not masked."""
    none_T = nothing(weight_T)
    masked_T = none_T if masked_T is None else masked_T
    loss_T = -weight_T.masked_fill(masked_T, 0.0) * tokens.advantages_T * tokens.policy_T
    return TokenLoss(
        loss_T, none_T if low_T is None else low_T, none_T if high_T is None else high_T, masked_T
    )
