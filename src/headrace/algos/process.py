"""Scores of steps -> advantages of tokens; all pure numpy.

In: for each attempt of a group, the scores of its steps and where they end. Out: for each attempt an advantage a
token, to which the outcome's is added. An attempt without step scores keeps its outcome advantage alone, and takes no
part in the baselines of the others.

    sum        DeepSeekMath's process-supervised GRPO (arXiv 2402.03300): scores normalised by the mean and deviation of
               all steps of the group, then summed from the token's step to the end
    min        PURE (arXiv 2504.15275): the return is close to the worst of the steps to come. Scores are weighted
               with softmax(-score / 0.1) over the steps of the attempt, lose the mean of the other attempts' steps,
               and are summed likewise. Its mixing with verified answers is the weight here.
    potential  scores are success estimates V at the ends of steps, and a token gets V_end - V_start of its step. Over
               all its steps an attempt gets V_last - V_0, whatever lies between, so no detour pays. V_0, the
               estimate at the prompt, is the group's mean after the first step.

Shape legend: G attempts, C steps of an attempt, L sampled tokens of an attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Steps = Sequence[np.ndarray]
"""float [C] for each attempt."""
WORST_TEMPERATURE = 0.1


def sum_form(scores: Steps, *, eps: float = 1e-4) -> list[np.ndarray]:
    """float64 [C] an attempt: the sum of normalised scores from each step on."""
    every = np.concatenate(scores).astype(np.float64)
    if every.size < 2:
        return [np.zeros(len(values)) for values in scores]
    mean, scale = every.mean(), every.std(ddof=1) + eps
    return [_to_come((values - mean) / scale) for values in scores]


def min_form(scores: Steps, *, temperature: float = WORST_TEMPERATURE) -> list[np.ndarray]:
    """float64 [C] an attempt: the sum of worst-weighted scores from each step on, over the others' mean step."""
    weighted = [_worst_weighted(values, temperature) for values in scores]
    total, num_steps = sum(map(np.sum, weighted)), sum(map(len, weighted))
    advantages = []
    for values in weighted:
        num_others = num_steps - len(values)
        baseline = (total - values.sum()) / num_others if num_others else 0.0
        advantages.append(_to_come(values - baseline))
    return advantages


def potential_form(scores: Steps) -> list[np.ndarray]:
    """float64 [C] an attempt: how much each step raised the estimate."""
    firsts = [float(values[0]) for values in scores if len(values)]
    start = float(np.mean(firsts)) if firsts else 0.0
    return [np.diff(np.asarray(values, dtype=np.float64), prepend=start) for values in scores]


FORMS: dict[str, Callable[[Steps], list[np.ndarray]]] = {
    "sum": sum_form,
    "min": min_form,
    "potential": potential_form,
}


def token_advantages(
    outcome: Sequence[float] | np.ndarray,
    ends: Steps,
    scores: Steps,
    *,
    form: str,
    weight: float,
) -> list[np.ndarray | float]:
    """For each attempt float32 [L], or its outcome advantage alone where ``scores`` has none for it. ``outcome``:
    float [G]; ``ends``: int [C] an attempt, in sampled tokens."""
    scored = [i for i, values in enumerate(scores) if len(values)]
    if not scored:
        return [float(value) for value in outcome]
    shaped = dict(zip(scored, FORMS[form]([scores[i] for i in scored]), strict=True))
    return [
        (value + weight * np.repeat(shaped[i], np.diff(ends[i], prepend=0))).astype(np.float32)
        if i in shaped
        else float(value)
        for i, value in enumerate(np.asarray(outcome, dtype=np.float64).tolist())
    ]


def trajectory_advantages(
    outcome: Sequence[float] | np.ndarray,
    steps: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]],
    *,
    form: str,
    weight: float,
) -> list[np.ndarray | float]:
    """As ``token_advantages``, of attempts with any number of trajectories, one after the other. ``steps``: (ends,
    scores) of each trajectory, in its own sampled tokens; none: the attempt has no step scores. A trajectory begins
    anew, and is compared with those in the same place of the other attempts: another place may be another role."""
    nothing = (np.zeros(0, np.int32), np.zeros(0, np.float32))
    num_places = max(map(len, steps), default=0)
    by_place = []
    for place in range(num_places):
        here = [told[place] if place < len(told) else nothing for told in steps]
        ends, scores = zip(*here, strict=True)
        by_place.append(token_advantages(outcome, ends, scores, form=form, weight=weight))
    return [
        np.concatenate([by_place[k][i] for k, (_, scores) in enumerate(told) if len(scores)])
        if any(len(scores) for _, scores in told)
        else float(outcome[i])
        for i, told in enumerate(steps)
    ]


def _worst_weighted(values: np.ndarray, temperature: float) -> np.ndarray:
    """Scores times softmax(-scores / temperature): their sum is close to the least of them."""
    values = np.asarray(values, dtype=np.float64)
    weights = np.exp((values.min() - values) / temperature)
    return values * weights / weights.sum()


def _to_come(values: np.ndarray) -> np.ndarray:
    """The sum of each entry and all after it."""
    return np.cumsum(values[::-1])[::-1]
