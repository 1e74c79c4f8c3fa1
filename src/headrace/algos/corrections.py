"""Which two policies a ratio compares, and how the gap to the behaviour policy is corrected.

Three policies meet in a loss: ``policy`` (the weights being trained), ``prox`` (the same weights when the
batch was taken) and ``behavior`` (what the engine really sampled from, never recomputed). A loss clips
policy / anchor; what the anchor leaves out, prox / behavior, is weighted by a detached, capped ratio:

    loss       correction   anchor      weight
    ppo        none         behavior    1
    ppo        tis          prox        min(prox / behavior, cap)
    cispo      none         behavior    1
    cispo      tis          prox        min(prox / behavior, cap)
    gspo       none         behavior    1
    decoupled  none         prox        min(prox / behavior, cap)

Every other pairing would count a ratio twice or drop it, and is refused. Truncated importance sampling:
fengyao.notion.site/off-policy-rl (2025). Decoupled PPO: Hilton et al., arXiv 2110.00641.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from headrace.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped here: e^20 is far outside every clip range, and e^89 is infinite in float32."""

LossName = Literal["ppo", "cispo", "gspo", "decoupled"]
CorrectionName = Literal["none", "tis"]


@dataclass(frozen=True, slots=True)
class RatioPlan:
    """What a loss and a correction together divide by what."""

    anchor: Literal["behavior", "prox"]
    """The policy in the denominator of the clipped ratio."""
    weighted: bool
    """True when prox / behavior, capped and detached, multiplies the loss."""


_PLANS: dict[tuple[str, str], RatioPlan] = {
    ("ppo", "none"): RatioPlan("behavior", False),
    ("ppo", "tis"): RatioPlan("prox", True),
    ("cispo", "none"): RatioPlan("behavior", False),
    ("cispo", "tis"): RatioPlan("prox", True),
    ("gspo", "none"): RatioPlan("behavior", False),
    ("decoupled", "none"): RatioPlan("prox", True),
}

_REFUSED: dict[tuple[str, str], str] = {
    ("gspo", "tis"): (
        "loss 'gspo' weighs whole sequences, which the token weights of correction 'tis' would undo: "
        "set correction to 'none'"
    ),
    ("decoupled", "tis"): (
        "loss 'decoupled' already weighs by prox / behavior, so correction 'tis' would count it twice: "
        "set correction to 'none'"
    ),
}


def ratio_plan(loss: str, correction: str) -> RatioPlan:
    """The plan for a pairing; raises ConfigError for one that cannot be right."""
    pair = (loss, correction)
    if pair in _REFUSED:
        raise ConfigError(_REFUSED[pair])
    if pair not in _PLANS:
        losses = ", ".join(sorted({name for name, _ in _PLANS}))
        raise ConfigError(
            f"loss {loss!r} with correction {correction!r} is unknown: losses are {losses}, "
            "corrections are none, tis"
        )
    return _PLANS[pair]


def ratio(numerator_T: torch.Tensor, denominator_T: torch.Tensor) -> torch.Tensor:
    """exp(numerator - denominator) of log-probabilities, kept finite."""
    return (numerator_T - denominator_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated_weights(
    prox_logprobs_T: torch.Tensor, behavior_logprobs_T: torch.Tensor, *, cap: float
) -> torch.Tensor:
    """min(prox / behavior, cap), detached."""
    return ratio(prox_logprobs_T, behavior_logprobs_T).clamp(max=cap).detach()
