"""How a trainer trains: every choice that is not a piece of machinery, checked once.

In: plain values by name; those left out have the defaults below. Out: one frozen ``TrainOptions``. What only has a
meaning together with a model or with ranks is checked where these are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.algos.aggregation import Aggregation, check_aggregation
from headrace.algos.kl import KLName
from headrace.errors import ConfigError
from headrace.models.lora import LoraSpec
from headrace.trainers.distilling import Distillation
from headrace.trainers.objective import Objective, Part
from headrace.trainers.optim import Schedule, check_schedule
from headrace.trainers.placement import Offload
from headrace.trainers.routes import RoutingName

ComputeDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    expert_ranks: int = 1
    """Groups of so many ranks divide a mixture's experts."""
    offload: Offload = "none"
    """Keep the optimizer's moments, or the first of each weight's two, in host memory, for a process that trains alone,
    or all float32 weights and optimizer state, for ranks with a process group."""
    loss: str = "ppo"
    aggregation: Aggregation = "token-mean"
    max_tokens: int | None = None
    """The constant of aggregation ``seq-mean-token-sum-norm``."""
    clip_low: float | None = None
    clip_high: float | None = None
    corrections: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the loss, its corrections and the guard by qualified name (``catalog.PARAMETERS``)."""
    guard: str = "warn"
    parts: Sequence[Part] = ()
    """Further components of the loss."""
    kl: KLName = "none"
    kl_coef: float = 0.0
    keep_reference: bool = True
    """False: the reference of a KL term is not kept here, samples bring its log-probabilities."""
    balance_coef: float = 0.0
    echo_coef: float = 0.0
    """Weight of the cross-entropy on what an environment answered; 0: those tokens are not trained on."""
    optimal_baseline: bool = False
    """Samples bring returns, which are held against their group's optimal baseline, at a backward for each attempt."""
    pivot_weight: float = 1.0
    """Of the branches' part of the loss, which has its own denominator."""
    routing: RoutingName = "keep"
    """``keep`` routes tokens as the engine recorded it, ``live`` only compares."""
    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float | None = 1.0
    """None clips nothing."""
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    total_steps: int | None = None
    row_tokens: int = 16384
    minibatches: int = 1
    on_nonfinite: Literal["stop", "skip"] = "stop"
    compute_dtype: ComputeDtype = "fp32"
    """What the model is computed and published in."""
    share_prefixes: bool | None = None
    """Compute a prompt once for all attempts at it; None: on a GPU."""
    eager: bool = False
    """Compile nothing, for debugging."""
    lora: LoraSpec | None = None
    """Train this adapter and leave the model's own weights alone."""
    distillation: Distillation | None = None
    """What is made of the teachers' scores that samples bring; None: nothing."""

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, max_tokens=self.max_tokens)
        check_schedule(self.schedule, warmup_steps=self.warmup_steps, total_steps=self.total_steps)
        for name in ("minibatches", "row_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.echo_coef < 0:
            raise ConfigError(f"echo_coef must be at least 0, not {self.echo_coef}")
        if self.echo_coef and self.distillation is not None and self.distillation.compares:
            raise ConfigError(
                f"echo_coef is {self.echo_coef}, but divergence {self.distillation.divergence!r} is read off the head "
                "in a pass that values no other tokens: use divergence 'sampled', or set echo_coef to 0"
            )
        if self.learning_rate < 0:
            raise ConfigError(f"learning_rate must be at least 0, not {self.learning_rate}")
        if self.grad_clip is not None and self.grad_clip <= 0:
            raise ConfigError(f"grad_clip must be above 0, or None to clip nothing, not {self.grad_clip}")

    def objective(self) -> Objective:
        return Objective(
            loss=self.loss,
            corrections=self.corrections,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            options=self.options,
            guard=self.guard,
            kl=self.kl,
            kl_coef=self.kl_coef,
            parts=self.parts,
        )
