"""What a row of a batch adds to the loss: policy loss, corrections, KL and further parts, put together from ``algos``.

In: log-probabilities of a row's loss tokens under the policy (with gradient) and everything recorded
about those tokens. Out: one scalar to run backward from, already divided by the whole optimizer step's
normaliser, and per-token values for the metrics. Which ratio is compared and which is a weight is fixed
by ``composition.compose``; settings that would have no effect are refused.

The loss is a sum of ``Component`` objects, each with weights of its own: tokens that one of them adds never dilute
those of another. A further component (distillation, an auxiliary loss) is a ``Part`` given to the objective:
it says which tokens it covers and what they cost; ``rows.train_rows`` counts its denominator with the others,
over all rows and ranks of the optimizer step, before the first backward.

Legend: N loss tokens of the row, T all its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from headrace.algos.aggregation import aggregate
from headrace.algos.composition import Composition, compose
from headrace.algos.corrections import (
    FILTERS,
    WEIGHTS,
    CorrectionTokens,
    TokenWeights,
    interpolated_prox,
    truncated,
)
from headrace.algos.kl import K1_REFUSAL, KL_ESTIMATORS
from headrace.algos.losses import LOSSES
from headrace.algos.parameters import of_owner
from headrace.algos.ratios import LossTokens, TokenLoss, nothing
from headrace.data.packing import PackedRow
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
    part_weights_N: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """float32, each token's share in the further components, by name; 0 where one does not cover it."""
    m2po_cutoff: float | None = None
    """Of the whole batch (``corrections.m2po_cutoff``); None: that filter is not in use."""


@dataclass(frozen=True, slots=True)
class Component:
    """One term of the loss: coef * sum(loss_N * weights_N)."""

    name: str
    loss_N: torch.Tensor
    weights_N: torch.Tensor
    coef: float = 1.0


class Part(Protocol):
    """A further component, made of what the rows carry."""

    name: str
    coef: float

    def covers(self, row: PackedRow) -> np.ndarray:
        """bool [T], the tokens it is a mean over; of these, loss tokens only count."""
        ...

    def loss(self, policy_logprobs_N: torch.Tensor, row: LossInputs) -> torch.Tensor:
        """[N]; what it is on tokens that are not covered does not matter, but it must be finite."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutcome:
    """One row's part of the loss, and the detached per-token values the metrics are made of."""

    loss: torch.Tensor
    values: Mapping[str, torch.Tensor]
    """The components of ``loss`` by name, before their coefficients."""
    tokens: TokenLoss
    capped_N: torch.Tensor
    """bool: the importance weight was cut at its cap."""
    masked: Mapping[str, torch.Tensor]
    """bool [N] by cause (``clip``, a correction's name): this left the token no policy gradient."""
    balance: torch.Tensor | None = None
    """The part of ``loss`` due to unevenly used experts, before its coefficient; None: it has none."""
    distillation: torch.Tensor | None = None
    """The row's share of the divergence from its teachers; None: it has none."""
    environment: torch.Tensor | None = None
    """The row's share of the cross-entropy of what an environment answered; None: it has none."""
    num_environment_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss, its corrections, its KL term and further parts, checked against each other once."""

    loss: str = "ppo"
    corrections: Sequence[str] = ()
    clip_low: float | None = None
    """None: as the loss's authors have it (``catalog.LOSSES``); so for ``clip_high``."""
    clip_high: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Parameters by qualified name (``tis.cap``); those left out have their defaults."""
    guard: str = "off"
    kl: str = "none"
    kl_coef: float = 0.0
    parts: Sequence[Part] = ()
    composition: Composition = field(init=False)

    def __post_init__(self) -> None:
        composition = compose(
            self.loss, self.corrections, clip_low=self.clip_low, clip_high=self.clip_high, options=self.options,
            guard=self.guard,
        )  # fmt: skip
        object.__setattr__(self, "composition", composition)
        if self.kl == "k1":
            raise ConfigError(K1_REFUSAL)
        if self.kl != "none" and self.kl not in KL_ESTIMATORS:
            raise ConfigError(f"kl {self.kl!r} is unknown: use none, {', '.join(KL_ESTIMATORS)}")
        if (self.kl == "none") != (self.kl_coef == 0.0) or self.kl_coef < 0:
            raise ConfigError(
                f"kl {self.kl!r} with kl_coef {self.kl_coef} has no effect: set both, or kl to 'none' and "
                "kl_coef to 0"
            )

    @property
    def needs_prox(self) -> bool:
        """prox has to be computed before the policy moves."""
        plan = self.composition.plan
        return plan.filters_need_prox or (plan.anchor == "prox" and not self._interpolates)

    @property
    def needs_batch(self) -> bool:
        """prox has to be computed before the first backward."""
        return self.composition.plan.needs_batch

    @property
    def needs_reference(self) -> bool:
        return self.kl != "none"

    @property
    def _interpolates(self) -> bool:
        return self.composition.values.get("decoupled.prox") == "interpolated"

    @property
    def causes(self) -> tuple[str, ...]:
        """What may leave a token without policy gradient (``RowOutcome.masked``)."""
        plan = self.composition.plan
        return ("clip", *(name for name in WEIGHTS if name == plan.weight), *plan.filters)

    @property
    def component_names(self) -> tuple[str, ...]:
        return ("policy", *("kl",) * self.needs_reference, *(part.name for part in self.parts))

    def option(self, name: str) -> Any:
        """The value of a parameter that is in use."""
        return self.composition.values[name]

    def __call__(self, policy_logprobs_N: torch.Tensor, row: LossInputs) -> RowOutcome:
        policy_N = policy_logprobs_N.detach()
        seen = CorrectionTokens(
            policy_T=policy_N,
            prox_T=policy_N if row.prox_logprobs_N is None else row.prox_logprobs_N,
            behavior_T=row.behavior_logprobs_N,
            advantages_T=row.advantages_N,
            sequence_T=row.sequence_N,
            num_sequences=row.num_sequences,
        )
        anchor_N = seen.behavior_T
        if self.composition.plan.anchor == "prox":
            anchor_N = seen.prox_T
            if self._interpolates:
                anchor_N = interpolated_prox(seen.policy_T, seen.behavior_T, row.lags_N)
        clips = self.composition.clips
        tokens = LOSSES[self.loss](
            LossTokens(
                policy_T=policy_logprobs_N,
                anchor_T=anchor_N,
                behavior_T=seen.behavior_T,
                advantages_T=seen.advantages_T,
                sequence_T=seen.sequence_T,
                num_sequences=seen.num_sequences,
            ),
            **({} if clips is None else {"clip_low": clips[0], "clip_high": clips[1]}),
            **self._loss_parameters(),
        )
        weights, masked = self._weights(seen, anchor_N, row)
        policy = Component("policy", tokens.loss_T * weights.weights_T, row.weights_N)
        parts = [policy, *self._parts(policy_logprobs_N, row)]
        values = {part.name: aggregate(part.loss_N, part.weights_N) for part in parts}
        loss = sum((part.coef * values[part.name] for part in parts), torch.zeros_like(values["policy"]))
        return RowOutcome(
            loss=loss,
            values={name: value.detach() for name, value in values.items()},
            tokens=replace(tokens, loss_T=tokens.loss_T.detach()),
            capped_N=weights.capped_T,
            masked={"clip": tokens.masked_T, **masked},
        )

    def _loss_parameters(self) -> dict[str, Any]:
        parameters = of_owner(self.composition.values, self.loss)
        if self.loss == "decoupled":
            return {"dual_clip": parameters["dual_clip"]}
        return parameters

    def _weights(
        self, seen: CorrectionTokens, anchor_N: torch.Tensor, row: LossInputs
    ) -> tuple[TokenWeights, dict[str, torch.Tensor]]:
        """What multiplies each token's loss, 0 where it is left out; and the tokens left out, by cause."""
        plan, values = self.composition.plan, self.composition.values
        weights = TokenWeights(torch.ones_like(seen.policy_T), nothing(seen.policy_T), nothing(seen.policy_T))
        masked: dict[str, torch.Tensor] = {}
        if plan.weight == "decoupled":
            weights = truncated(anchor_N - seen.behavior_T, cap=self.option("decoupled.cap"))
        elif plan.weight is not None:
            weights = WEIGHTS[plan.weight](seen, **of_owner(values, plan.weight))
            masked[plan.weight] = weights.masked_T
        kept_N = torch.ones_like(weights.capped_T)
        for name in plan.filters:
            parameters = {"cutoff": row.m2po_cutoff} if name == "m2po" else of_owner(values, name)
            masked[name] = ~FILTERS[name](seen, **parameters)
            kept_N = kept_N & ~masked[name]
        return TokenWeights(weights.weights_T * kept_N, weights.capped_T, weights.masked_T), masked

    def _parts(self, policy_logprobs_N: torch.Tensor, row: LossInputs) -> list[Component]:
        """The components besides the policy loss. KL is a mean over the same tokens; filters leave it alone."""
        parts = [
            Component(part.name, part.loss(policy_logprobs_N, row), row.part_weights_N[part.name], part.coef)
            for part in self.parts
        ]
        if row.ref_logprobs_N is None or not self.needs_reference:
            return parts
        kl_N = KL_ESTIMATORS[self.kl](
            policy_logprobs_T=policy_logprobs_N,
            behavior_logprobs_T=row.behavior_logprobs_N,
            ref_logprobs_T=row.ref_logprobs_N,
        )
        return [Component("kl", kl_N, row.weights_N, self.kl_coef), *parts]
