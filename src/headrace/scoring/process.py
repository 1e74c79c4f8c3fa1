"""The scorer of a process of its own, for rewards given as ``module:function``.

In: settings that crossed a process boundary, so plain values only. Out: a ``FunctionScorer`` whose
functions were looked up here, in the child, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import ConfigError
from headrace.scoring.calls import to_role_log
from headrace.scoring.functions import FunctionScorer
from headrace.scoring.resolve import resolve

_KEYS = ("functions", "weights", "timeout_s", "retries", "workers")


def scorer_role(settings: Mapping[str, Any]) -> FunctionScorer:
    """In a process of its own."""
    return build_scorer(settings, log=to_role_log)


def build_scorer(settings: Mapping[str, Any], *, log: Callable[[str], None] | None = None) -> FunctionScorer:
    """``functions`` maps reward names to references; the other keys are FunctionScorer's arguments, and so is
    ``log``."""
    unknown = sorted(set(settings) - set(_KEYS))
    if unknown:
        raise ConfigError(f"scorer setting {unknown[0]!r} is unknown: use {', '.join(_KEYS)}")
    return FunctionScorer(
        {
            name: resolve(reference, what="reward.functions")
            for name, reference in settings["functions"].items()
        },
        weights=settings.get("weights"),
        timeout_s=settings.get("timeout_s", 60.0),
        retries=settings.get("retries", 1),
        workers=settings.get("workers", 4),
        log=log,
    )
