"""KL(policy || reference) as a loss term, per token, from tokens the behaviour policy sampled.

With d = log policy - log ref, both estimators have exactly the gradient of KL(policy || ref) in
expectation over the behaviour policy's own samples:

    k2   sg(policy / behavior) * d^2 / 2
    k3   (policy / behavior) * (e^-d - 1 + d)       the ratio is NOT detached

``k1``, d itself, is an estimate for people and for rewards: as a loss its gradient is zero in expectation, so it is
not offered as one. Without its ratio k2 is right on-policy only. Plain k3 as a loss, or k3 with a detached
ratio, has the gradient of KL(ref || policy) instead: the wrong direction. Schulman,
joschu.net/blog/kl-approx.html; DeepSeek-V3.2, arXiv 2512.02556.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from headrace.algos.ratios import MAX_LOG_RATIO, ratio

KLName = Literal["none", "k2", "k3"]


K1_REFUSAL = "kl 'k1' as a loss has a gradient of zero in expectation, so it would hold nothing: use k2 or k3"


class KLEstimator(Protocol):
    def __call__(
        self,
        *,
        policy_logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        ref_logprobs_T: torch.Tensor,
    ) -> torch.Tensor: ...


def k1(
    *, policy_logprobs_T: torch.Tensor, behavior_logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor
) -> torch.Tensor:
    """log policy - log ref, for figures and rewards."""
    return policy_logprobs_T - ref_logprobs_T


def k2(
    *, policy_logprobs_T: torch.Tensor, behavior_logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor
) -> torch.Tensor:
    weight_T = ratio(policy_logprobs_T, behavior_logprobs_T).detach()
    return weight_T * (policy_logprobs_T - ref_logprobs_T).square() / 2


def k3(
    *, policy_logprobs_T: torch.Tensor, behavior_logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor
) -> torch.Tensor:
    gap_T = (policy_logprobs_T - ref_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ratio(policy_logprobs_T, behavior_logprobs_T) * (torch.expm1(-gap_T) + gap_T)


KL_ESTIMATORS: dict[str, KLEstimator] = {"k2": k2, "k3": k3}
"""Those that are right as a loss."""
