"""Divergences from a teacher as a loss, per token, on sequences that the student sampled.

With t the teacher's distribution at a position, pi the policy's and mu the one the token was drawn from:

    sampled   KL(pi || t) by a policy gradient on the drawn token: w * sg(log pi - log t), gradient through pi / mu
    reverse   KL(pi || t), computed
    forward   KL(t || pi), computed

``sampled`` has in expectation over mu exactly the gradient of KL(pi || t) at each position, whatever the lag of mu,
as long as no weight is cut; the gap is taken to pi and not to mu for that reason. The other two compare whole
distributions over the teacher's likeliest tokens and one bucket for all the rest, so both sides stay normalised.
Throwing tokens together never raises a divergence: what is computed is a lower bound, exact where pi and t have the
same proportions inside the bucket.

Formulas: generalised knowledge distillation, arXiv 2306.13649; on-policy distillation as a policy gradient:
thinkingmachines.ai/blog/on-policy-distillation (2025).

Legend: T loss tokens of one row, K entries of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from headrace.algos.ratios import MAX_LOG_RATIO, ratio

DivergenceName = Literal["sampled", "forward", "reverse"]

MAX_WEIGHT = 5.0
"""Largest pi / mu that a drawn token is weighed with; beyond it the estimate is biased towards less."""
FLOOR = 1e-6
"""Added to the bucket of the rest: below it float32 cannot tell 1 minus a sum of probabilities from 0."""


@dataclass(frozen=True, slots=True)
class TokenDivergence:
    """A loss per token, and the divergence it stands for, without gradient."""

    loss_T: torch.Tensor
    value_T: torch.Tensor


def sampled(
    policy_logprobs_T: torch.Tensor,
    behavior_logprobs_T: torch.Tensor,
    teacher_logprobs_T: torch.Tensor,
    *,
    baseline: float = 0.0,
    max_weight: float = MAX_WEIGHT,
) -> TokenDivergence:
    """Reverse KL by the drawn tokens alone. ``baseline``, any number known before the token was drawn, is taken off
    its gap: it changes the spread of the gradient and not its mean. The value is the k3 estimate, which is never
    negative."""
    gap_T = (policy_logprobs_T - teacher_logprobs_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight_T = ratio(policy_logprobs_T, behavior_logprobs_T).detach().clamp(max=max_weight)
    # A factor of 1 whose gradient is that of log pi.
    alive_T = (policy_logprobs_T - policy_logprobs_T.detach()).exp()
    return TokenDivergence(weight_T * (gap_T - baseline) * alive_T, weight_T * (torch.expm1(-gap_T) + gap_T))


def forward(policy_logprobs_TK: torch.Tensor, teacher_logprobs_TK: torch.Tensor) -> TokenDivergence:
    """KL(t || pi) over the teacher's entries and the rest; entries of -inf are none."""
    policy, teacher = _buckets(policy_logprobs_TK, teacher_logprobs_TK)
    return _computed(teacher, policy)


def reverse(policy_logprobs_TK: torch.Tensor, teacher_logprobs_TK: torch.Tensor) -> TokenDivergence:
    """KL(pi || t) over the teacher's entries and the rest; entries of -inf are none."""
    policy, teacher = _buckets(policy_logprobs_TK, teacher_logprobs_TK)
    return _computed(policy, teacher)


COMPUTED = {"forward": forward, "reverse": reverse}
"""Divergences that compare distributions, which needs the policy's log-probabilities at the teacher's entries."""


@dataclass(frozen=True, slots=True)
class _Buckets:
    """A distribution over entries and the rest: log-probabilities and probabilities."""

    logs_TK1: torch.Tensor
    probs_TK1: torch.Tensor


def _buckets(
    policy_logprobs_TK: torch.Tensor, teacher_logprobs_TK: torch.Tensor
) -> tuple[_Buckets, _Buckets]:
    present_TK = teacher_logprobs_TK > -torch.inf
    return _with_rest(policy_logprobs_TK, present_TK), _with_rest(teacher_logprobs_TK, present_TK)


def _with_rest(logprobs_TK: torch.Tensor, present_TK: torch.Tensor) -> _Buckets:
    logs_TK = logprobs_TK.masked_fill(~present_TK, 0.0)
    probs_TK = logs_TK.exp() * present_TK
    rest_T1 = (1.0 - probs_TK.sum(-1, keepdim=True) + FLOOR).clamp(min=FLOOR / 2)
    return _Buckets(torch.cat([logs_TK, rest_T1.log()], -1), torch.cat([probs_TK, rest_T1], -1))


def _computed(first: _Buckets, second: _Buckets) -> TokenDivergence:
    """KL(first || second)."""
    loss_T = (first.probs_TK1 * (first.logs_TK1 - second.logs_TK1)).sum(-1)
    return TokenDivergence(loss_T, loss_T.detach())
