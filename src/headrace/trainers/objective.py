"""What a row of a batch adds to the loss: policy loss, correction and KL, put together from ``algos``.

In: log-probabilities of a row's loss tokens under the policy (with gradient) and everything recorded
about those tokens. Out: one scalar to run backward from, already divided by the whole optimizer step's
normaliser, and per-token values for the metrics. Which ratio is clipped and which is a weight is fixed
by ``corrections.ratio_plan``; settings that would have no effect are refused.

Legend: N loss tokens of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.algos.aggregation import aggregate
from headrace.algos.corrections import ratio_plan, truncated_weights
from headrace.algos.kl import KL_ESTIMATORS
from headrace.algos.losses import DEFAULT_CLIPS, LOSSES, TokenLoss, check_clips
from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What is known of a row's loss tokens besides the policy's own log-probabilities."""

    behavior_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    lags_N: torch.Tensor
    """int64, versions between the weights that sampled the token and those being trained."""
    weights_N: torch.Tensor
    """float32, each token's share in the step's loss (``aggregation.sequence_weights``)."""
    sequence_N: torch.Tensor
    num_sequences: int
    prox_logprobs_N: torch.Tensor | None
    """None: no update has happened since the batch was taken, so the policy itself is prox."""
    ref_logprobs_N: torch.Tensor | None
    """None: there is no KL term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutcome:
    """One row's part of the loss, and the detached per-token values the metrics are made of."""

    loss: torch.Tensor
    kl: torch.Tensor
    """The part of ``loss`` due to KL, before its coefficient."""
    tokens: TokenLoss
    capped_N: torch.Tensor
    """bool: the importance weight was cut at its cap."""
    balance: torch.Tensor | None = None
    """The part of ``loss`` due to unevenly used experts, before its coefficient; None: it has none."""
    distillation: torch.Tensor | None = None
    """The row's share of the divergence from its teachers; None: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss, its correction and its KL term, checked against each other once."""

    loss: str = "ppo"
    correction: str = "none"
    clip_low: float | None = None
    """None: as the loss's authors have it (``losses.DEFAULT_CLIPS``); so for ``clip_high``."""
    clip_high: float | None = None
    dual_clip: float | None = None
    tis_cap: float = 2.0
    """Cap of the weight prox / behavior, in ``tis`` and ``decoupled``."""
    kl: str = "none"
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        ratio_plan(self.loss, self.correction)
        low, high = self.clips
        check_clips(self.loss, clip_low=low, clip_high=high, dual_clip=self.dual_clip)
        if self.tis_cap <= 0:
            raise ConfigError(f"tis_cap must be above 0, not {self.tis_cap}")
        if self.kl != "none" and self.kl not in KL_ESTIMATORS:
            raise ConfigError(f"kl {self.kl!r} is unknown: use none, {', '.join(KL_ESTIMATORS)}")
        if (self.kl == "none") != (self.kl_coef == 0.0) or self.kl_coef < 0:
            raise ConfigError(
                f"kl {self.kl!r} with kl_coef {self.kl_coef} has no effect: set both, or kl to 'none' and "
                "kl_coef to 0"
            )

    @property
    def clips(self) -> tuple[float, float]:
        low, high = DEFAULT_CLIPS[self.loss]
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def needs_prox(self) -> bool:
        return ratio_plan(self.loss, self.correction).anchor == "prox"

    @property
    def needs_reference(self) -> bool:
        return self.kl != "none"

    def __call__(self, policy_logprobs_N: torch.Tensor, row: LossInputs) -> RowOutcome:
        plan = ratio_plan(self.loss, self.correction)
        prox_N = policy_logprobs_N.detach() if row.prox_logprobs_N is None else row.prox_logprobs_N
        low, high = self.clips
        tokens = LOSSES[self.loss](
            policy_logprobs_T=policy_logprobs_N,
            anchor_logprobs_T=prox_N if plan.anchor == "prox" else row.behavior_logprobs_N,
            advantages_T=row.advantages_N,
            sequence_T=row.sequence_N,
            num_sequences=row.num_sequences,
            clip_low=low,
            clip_high=high,
            dual_clip=self.dual_clip,
        )
        loss_N = tokens.loss_T
        capped_N = torch.zeros_like(tokens.masked_T)
        if plan.weighted:
            weights_N = truncated_weights(prox_N, row.behavior_logprobs_N, cap=self.tis_cap)
            loss_N, capped_N = loss_N * weights_N, weights_N >= self.tis_cap
        loss = aggregate(loss_N, row.weights_N)
        kl = torch.zeros_like(loss)
        if row.ref_logprobs_N is not None and self.needs_reference:
            kl_N = KL_ESTIMATORS[self.kl](
                policy_logprobs_T=policy_logprobs_N,
                behavior_logprobs_T=row.behavior_logprobs_N,
                ref_logprobs_T=row.ref_logprobs_N,
            )
            kl = aggregate(kl_N, row.weights_N)
            loss = loss + self.kl_coef * kl
        return RowOutcome(loss=loss, kl=kl.detach(), tokens=tokens, capped_N=capped_N)
