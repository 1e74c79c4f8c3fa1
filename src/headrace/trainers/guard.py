"""Says so, slows down or stops when a batch is too far from the policy that is to learn from it.

In: how far the batch is from the weights the step starts from (``metrics.behavior_metrics``), before any update.
Out: a factor for the step's learning rate and a warning, or a TrainingError. Three signs are watched: the share of
effective samples, whose fall comes before a collapse; the gap between engine and trainer on tokens of the same
version, where nothing but a fault makes it large; and in a mixture of experts, if asked, the share of tokens that
would now be routed to other experts. Scaling is VCPO's, the square root of the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError, TrainingError

GuardAction = Literal["off", "warn", "scale", "stop"]


@dataclass(frozen=True, slots=True)
class Verdict:
    rate_factor: float = 1.0
    warning: str | None = None


class Guard:
    """``effective_samples``, ``mismatch`` and ``route_flips`` are the bounds; a warning is given when one is crossed,
    and again only after a step within all."""

    def __init__(
        self,
        action: str,
        *,
        effective_samples: float = 0.1,
        mismatch: float = 0.1,
        route_flips: float = 1.0,
    ) -> None:
        if action not in ("off", "warn", "scale", "stop"):
            raise ConfigError(f"guard {action!r} is unknown: use off, warn, scale or stop")
        self.action = action
        self._effective_samples, self._mismatch, self._route_flips = effective_samples, mismatch, route_flips
        self._has_warned = False

    def judge(self, figures: Mapping[str, float], *, step: int) -> Verdict:
        """``figures`` of the step's batch; those that are missing are not judged."""
        if self.action == "off":
            return Verdict()
        problem = self._problem(figures)
        if problem and self.action == "stop":
            raise TrainingError(f"step {step}: {problem}, or set algo.guard to warn; nothing was updated")
        warning = f"step {step}: {problem}" if problem and not self._has_warned else None
        self._has_warned = bool(problem)
        if self.action != "scale":
            return Verdict(warning=warning)
        # What is not finite is not judged here: such a step is never applied.
        share = figures.get("effective_samples", 1.0)
        return Verdict(math.sqrt(share) if math.isfinite(share) else 1.0, warning)

    def _problem(self, figures: Mapping[str, float]) -> str:
        mismatch = figures.get("mismatch_mean", 0.0)
        if mismatch > self._mismatch:
            return (
                f"the trainer's log-probabilities differ from the engine's by {mismatch:.3g} on tokens of the same "
                f"version (guard.mismatch = {self._mismatch:g}): compare model.dtype of both sides, or correct the "
                "gap with algo.corrections"
            )
        flips = figures.get("route_flips_worst", 0.0)
        if flips > self._route_flips:
            return (
                f"in one layer {flips:.1%} of the tokens would now be routed to other experts than those that computed "
                f"them (guard.route_flips = {self._route_flips:g}): lower rollout.max_lag or trainer.learning_rate"
            )
        share = figures.get("effective_samples", 1.0)
        if share < self._effective_samples:
            return (
                f"the batch is worth {share:.1%} of its samples (guard.effective_samples = "
                f"{self._effective_samples:g}): lower rollout.max_lag or trainer.learning_rate, or filter with "
                "algo.corrections"
            )
        return ""
