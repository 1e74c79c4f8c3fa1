"""Where to branch off a failed attempt (DEEP-GRPO, arXiv 2602.14169); all pure numpy.

In: the tokens of a failed attempt, and what earlier branches taught about how deep a pivot may lie. Out: one point
inside the attempt, drawn with probability proportional to

    Q(t) ~ P(success | t/T) * (t/T)^gamma

over the ends of its segments. P is a logistic regression on the relative depth alone, fitted anew from a window of
outcomes ("did any branch of that depth succeed?") and 1 everywhere until there are enough of both kinds. The first
factor shuns points from which nobody recovers, the second those that throw most of the attempt away. Where a judge has
scored the steps of the attempt, no point behind the beginning of its worst step is drawn: that is where it went wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.algos.parameters import Parameter

WINDOW = 10_000
"""Outcomes that are remembered, the newest."""
MIN_OUTCOMES = 11
"""So many, of both kinds, before the regression is believed."""
_RIDGE = 1e-2
_NEWTON_STEPS = 25

PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        "weight",
        1.0,
        "lambda: weight of the branches' part of the loss, which has its own denominator",
        at_least=0,
    ),
    Parameter("per_group", 1, "failed attempts of a group that are branched off, at most", at_least=1),
    Parameter("success", 1.0, "return from which an attempt has succeeded"),
    Parameter("gamma", 0.1, "higher prefers late pivots", at_least=0),
    Parameter("segment_tokens", 16, "a pivot lies after a multiple of so many tokens", at_least=1),
    Parameter("delimiters", (), "or after one of these texts, each of one token"),
    Parameter("segments", 0, "or where an attempt is cut into so many segments; 0: it is not", at_least=0),
)
"""The table ``pivots.options``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PivotRule:
    """How pivots are found and what becomes of them."""

    branches: int
    """Attempts that go on from one pivot."""
    segment_tokens: int = 16
    """A segment is so many tokens, unless the next two say otherwise."""
    delimiter_ids: tuple[int, ...] = ()
    """A segment ends with one of these tokens; empty: by length."""
    num_segments: int = 0
    """An attempt has so many segments; 0: as many as it takes."""
    gamma: float = 0.1
    success: float = 1.0
    """An attempt with at least this return has succeeded."""
    per_group: int = 1
    """Failed attempts of one group that are branched off, at most."""


def segment_ends(token_ids: np.ndarray, rule: PivotRule) -> np.ndarray:
    """int64, tokens before each possible pivot of an attempt: at least one, and one is left."""
    length = len(token_ids)
    if rule.delimiter_ids:
        ends = np.flatnonzero(np.isin(token_ids, rule.delimiter_ids)) + 1
    elif rule.num_segments:
        ends = np.round(np.arange(1, rule.num_segments) * length / rule.num_segments).astype(np.int64)
    else:
        ends = np.arange(rule.segment_tokens, length, rule.segment_tokens)
    return np.unique(ends[(ends > 0) & (ends < length)])


def before_the_worst(step_ends: np.ndarray, step_scores: np.ndarray) -> int:
    """Tokens before the step with the lowest score, the first of equals."""
    worst = int(np.argmin(step_scores))
    return int(step_ends[worst - 1]) if worst else 0


@dataclass(frozen=True, slots=True)
class SuccessModel:
    """P(success | depth) as logit = intercept + slope * depth."""

    intercept: float = 0.0
    slope: float = 0.0

    def probability(self, depths: np.ndarray) -> np.ndarray:
        logits = np.clip(self.intercept + self.slope * np.asarray(depths, dtype=np.float64), -30.0, 30.0)
        return 1.0 / (1.0 + np.exp(-logits))


def fit_success(depths: Sequence[float], successes: Sequence[bool]) -> SuccessModel:
    """By Newton's method with a slight ridge, so that outcomes which depth separates have a finite fit too."""
    labels = np.asarray(successes, dtype=np.float64)
    if len(labels) < MIN_OUTCOMES or labels.min() == labels.max():
        return SuccessModel()
    features = np.stack([np.ones(len(labels)), np.asarray(depths, dtype=np.float64)], axis=1)
    weights = np.zeros(2)
    for _ in range(_NEWTON_STEPS):
        chances = SuccessModel(*weights).probability(features[:, 1])
        gradient = features.T @ (labels - chances) - _RIDGE * weights
        curvature = (features * (chances * (1 - chances))[:, None]).T @ features + _RIDGE * np.eye(2)
        weights = weights + np.linalg.solve(curvature, gradient)
    return SuccessModel(float(weights[0]), float(weights[1]))


def pivot_probabilities(
    ends: np.ndarray, num_tokens: int, *, model: SuccessModel, gamma: float
) -> np.ndarray:
    """float64, Q of each candidate."""
    depths = np.asarray(ends, dtype=np.float64) / num_tokens
    weights = model.probability(depths) * depths**gamma
    return weights / weights.sum()


def draw_pivot(
    token_ids: np.ndarray,
    rule: PivotRule,
    model: SuccessModel,
    draw: np.random.Generator,
    *,
    at_most: int | None = None,
) -> int | None:
    """Tokens before the pivot; None: the attempt is one segment and has none. ``at_most`` bounds them, unless no
    segment ends so soon."""
    ends = segment_ends(token_ids, rule)
    if not len(ends):
        return None
    if at_most is not None and ends[0] <= at_most:
        ends = ends[ends <= at_most]
    chances = pivot_probabilities(ends, len(token_ids), model=model, gamma=rule.gamma)
    chosen = int(np.searchsorted(np.cumsum(chances), draw.random()))
    return int(ends[min(chosen, len(ends) - 1)])
