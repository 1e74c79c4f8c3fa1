"""A loss with its corrections and parameters, checked against each other.

In: names and numbers from the settings. Out: a ``Composition``, or a ConfigError that says why it cannot be right. A
loss compares the policy with an anchor; what the anchor leaves out, prox / behavior, is weighed by at most one
correction, or by the loss itself: twice would be wrong, and so would a weight the loss undoes. Filters leave tokens
or sequences out and go with everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.algos.catalog import CORRECTIONS, LOSSES, PARAMETERS
from headrace.algos.parameters import Value, flat, resolve
from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RatioPlan:
    """What a loss and its corrections together divide by what."""

    anchor: Literal["behavior", "prox"]
    """The policy in the denominator of the loss's ratio."""
    weight: str | None
    """Who weighs prox / behavior: a correction, the loss itself, or nobody."""
    filters: tuple[str, ...] = ()

    @property
    def filters_need_prox(self) -> bool:
        return any(CORRECTIONS[name].needs in ("prox", "batch") for name in self.filters)

    @property
    def needs_batch(self) -> bool:
        """prox is needed of all rows before the first backward, even if the policy has not moved."""
        return any(CORRECTIONS[name].needs == "batch" for name in self.filters)


def ratio_plan(loss: str, corrections: Sequence[str] = ()) -> RatioPlan:
    """The plan for a composition; raises ConfigError for one that cannot be right."""
    if loss not in LOSSES:
        raise ConfigError(f"algo.loss is {loss!r}, which is unknown: use one of {', '.join(LOSSES)}.")
    for name in corrections:
        if name not in CORRECTIONS:
            raise ConfigError(
                f"algo.corrections has {name!r}, which is unknown: use any of {', '.join(CORRECTIONS)}."
            )
        if list(corrections).count(name) > 1:
            raise ConfigError(f"algo.corrections has {name!r} twice: name it once.")
    weights = [name for name in corrections if CORRECTIONS[name].kind != "filter"]
    if len(weights) > 1:
        raise ConfigError(
            f"algo.corrections has {' and '.join(weights)}, which all weigh by prox / behavior, so it would be "
            "counted twice: keep one of them."
        )
    filters = tuple(name for name in corrections if CORRECTIONS[name].kind == "filter")
    for name in weights:
        _check_weight(loss, name)
    if loss == "decoupled":
        return RatioPlan("prox", loss, filters)
    return RatioPlan("prox", weights[0], filters) if weights else RatioPlan("behavior", None, filters)


def _check_weight(loss: str, correction: str) -> None:
    entry, kind = LOSSES[loss], CORRECTIONS[correction].kind
    if entry.takes == "any weight" or (entry.takes, kind) == ("sequence weights", "sequence weight"):
        return
    fitting = [name for name, c in CORRECTIONS.items() if c.kind == "sequence weight"]
    remedy = f"use {' or '.join(fitting)}" if entry.takes == "sequence weights" else "leave it out"
    raise ConfigError(
        f"algo.corrections has {correction}, but algo.loss = {loss} cannot be weighed by it, since {entry.refusal}: "
        f"{remedy}, or choose another algo.loss."
    )


def parameter_values(
    loss: str,
    corrections: Sequence[str],
    options: Mapping[str, Any],
    *,
    guard: str = "off",
    others: Collection[str] = (),
) -> dict[str, Value]:
    """Every parameter of a composition and of ``others`` (``catalog.OF_A_RUN``) that a run uses, given or default;
    raises ConfigError for one that cannot be right."""
    owners = {loss, *corrections, "truncated", *others, *(() if guard == "off" else ("guard",))}
    values = resolve(options, known=PARAMETERS, in_use=owners)
    for name in ("icepop", "geo-filter"):
        if name in corrections and not values[f"{name}.low"] < values[f"{name}.high"]:  # type: ignore[operator]
            raise ConfigError(
                f'algo.options: "{name}.low" must be below "{name}.high", or nothing is left to train on.'
            )
    if values.get("rae.decay", 0.0) >= 1:  # type: ignore[operator]
        raise ConfigError(
            f'algo.options: "rae.decay" is {values["rae.decay"]}, so that the mean would never move: set it below 1.'
        )
    if "truncated.penalty" in flat(options) and values["truncated.mode"] != "penalise":
        raise ConfigError(
            'algo.options has "truncated.penalty", but nothing is penalised: set "truncated.mode" = "penalise", or '
            "leave it out."
        )
    if "overlong.penalty" in flat(options) and not values["overlong.tokens"]:
        raise ConfigError(
            'algo.options has "overlong.penalty", but no length is too long: set "overlong.tokens" above 0, or leave '
            "it out."
        )
    return values


@dataclass(frozen=True, slots=True)
class Composition:
    """A loss and its corrections, checked against each other."""

    plan: RatioPlan
    clips: tuple[float, float] | None
    values: Mapping[str, Value]


def compose(
    loss: str,
    corrections: Sequence[str] = (),
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    options: Mapping[str, Any] | None = None,
    guard: str = "off",
    others: Collection[str] = (),
) -> Composition:
    """Raises ConfigError for a composition that cannot be right, or of which a part would do nothing."""
    plan = ratio_plan(loss, corrections)
    clips = clips_of(loss, clip_low, clip_high)
    values = parameter_values(loss, corrections, options or {}, guard=guard, others=others)
    dual_clip = values.get(f"{loss}.dual_clip", 0.0)
    if clips is not None and isinstance(dual_clip, float) and 0 < dual_clip <= 1 + clips[1]:
        raise ConfigError(
            f'algo.options: "{loss}.dual_clip" must be above 1 + clip_high ({1 + clips[1]:g}), not {dual_clip:g}.'
        )
    return Composition(plan, clips, values)


def clips_of(loss: str, clip_low: float | None, clip_high: float | None) -> tuple[float, float] | None:
    """The clip range of a loss, or None if it has none; raises ConfigError for one that has no meaning."""
    default = LOSSES[loss].clips
    if default is None:
        if clip_low is not None or clip_high is not None:
            raise ConfigError(
                f"algo.clip_low and algo.clip_high have no meaning for algo.loss = {loss}: leave them unset."
            )
        return None
    low = default[0] if clip_low is None else clip_low
    high = default[1] if clip_high is None else clip_high
    if low < 0 or (low > 1 and loss != "gmpo") or high < 0:
        raise ConfigError(
            f"algo.clip_low must be between 0 and 1 and algo.clip_high at least 0, not {low} and {high}."
        )
    return low, high
