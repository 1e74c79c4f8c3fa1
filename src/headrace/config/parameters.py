"""The named parameters of ``algo.options`` and ``pivots.options``, as a run uses them.

In: settings. Out: every parameter that the run reads, given or default, or a ConfigError. Which names are taken
follows from the rest of the settings: a parameter that nobody would read is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.algos import pivots
from headrace.algos.catalog import OF_A_RUN
from headrace.algos.composition import parameter_values
from headrace.algos.parameters import resolve
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config.settings import Settings


def used_beside_the_loss(settings: Settings) -> tuple[str, ...]:
    """Owners of parameters in ``algo.options`` that are no part of the loss."""
    sometimes = {
        "rae": settings.algo.advantage == "rae",
        "kl": settings.algo.kl_coef > 0,
        "process": settings.scoring.process is not None,
    }
    return tuple(owner for owner in OF_A_RUN if sometimes.get(owner, True))


def algo_parameters(settings: Settings) -> dict[str, Any]:
    """Every parameter of ``algo.options`` that this run reads, by qualified name."""
    algo = settings.algo
    others = used_beside_the_loss(settings)
    return dict(parameter_values(algo.loss, algo.corrections, algo.options, guard=algo.guard, others=others))


def has_reference_engine(settings: Settings) -> bool:
    """Whether an engine of its own computes the log-probabilities of a KL term's reference."""
    return bool(algo_parameters(settings).get("kl.reference") == "engine")


def kl_terms(settings: Settings) -> tuple[str, float, float]:
    """Estimator and weight of the divergence in the loss, and its weight in the reward; of the weights at most one is
    above 0."""
    estimator, coef = algo_parameters(settings).get("kl.estimator", "none"), settings.algo.kl_coef
    return ("none", 0.0, coef) if estimator == "k1" else (estimator, coef, 0.0)


def loss_options(settings: Settings) -> Mapping[str, Any]:
    """The part of ``algo.options`` that belongs to the loss, its corrections and the guard."""
    options = settings.algo.options
    return {name: value for name, value in options.items() if name.partition(".")[0] not in OF_A_RUN}


def pivot_parameters(settings: Settings) -> dict[str, Any]:
    """Every parameter of ``pivots.options``."""
    options = settings.pivots.options
    values: dict[str, Any] = dict(resolve(options, known=pivots.PARAMETERS, table="pivots.options"))
    if values["delimiters"] and values["segments"]:
        raise ConfigError(
            "pivots.options has both delimiters and segments, which cut attempts differently: leave one out."
        )
    if "segment_tokens" in options and (values["delimiters"] or values["segments"]):
        raise ConfigError(
            "pivots.options has segment_tokens beside delimiters or segments, which cut attempts differently: leave "
            "one out."
        )
    return values
