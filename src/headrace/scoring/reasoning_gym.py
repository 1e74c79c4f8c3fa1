"""Rewards for reasoning-gym tasks: the generator's own ``score_answer``.

In: completions and the columns ``from_reasoning_gym`` yields. Out: a score in [0, 1] each. What is
scored is the last ``<answer>...</answer>`` of a completion, or all of it, stripped, when there is none,
since the generators give partial credit for an answer buried in other text.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from headrace.errors import RewardError, TaskError

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_reward(
    name: str, *, options: Mapping[str, Any] | None = None
) -> Callable[..., list[float]]:
    """A reward function for one generator's tasks; a few generators score by their ``options``."""
    score_answer = _score_function(name, options or {})

    def reasoning_gym(
        completions: list[Any], question: list[str], answer: list[Any], metadata: list[Mapping[str, Any]]
    ) -> list[float]:
        return _scores(score_answer, completions, question, answer, metadata)

    return reasoning_gym


def score(
    completions: list[Any], question: list[str], answer: list[Any], metadata: list[Mapping[str, Any]]
) -> list[float]:
    """The reward function for any generator, read from the task: usable by reference and for mixtures."""
    return _scores(
        _default_score_function(metadata[0]["source_dataset"]), completions, question, answer, metadata
    )


def extract_answer(completion: str) -> str:
    found = _ANSWER.findall(completion)
    return (found[-1] if found else completion).strip()


def _scores(
    score_answer: Callable[..., float],
    completions: list[Any],
    question: list[str],
    answer: list[Any],
    metadata: list[Mapping[str, Any]],
) -> list[float]:
    entries = (
        {"question": q, "answer": a, "metadata": m}
        for q, a, m in zip(question, answer, metadata, strict=True)
    )
    return [
        _score(score_answer, extract_answer(_text(completion)), entry)
        for completion, entry in zip(completions, entries, strict=True)
    ]


def _score(score_answer: Callable[..., float], text: str, entry: Mapping[str, Any]) -> float:
    try:
        return float(score_answer(text, entry))
    except Exception:
        # Some generators raise on text they cannot parse: a wrong answer. If the right answer raises as
        # well, the fault is the entry's or the generator's, and that error must be seen.
        score_answer(entry["answer"], entry)
        return 0.0


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


@cache
def _default_score_function(name: str) -> Callable[..., float]:
    return _score_function(name, {})


def _score_function(name: str, options: Mapping[str, Any]) -> Callable[..., float]:
    try:
        reasoning_gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise TaskError(
            f"this reward needs reasoning_gym ({error}): install Headrace's extra tasks, in its checkout by "
            "pip install -e '.[tasks]'"
        ) from error
    try:
        return reasoning_gym.create_dataset(name, **{"size": 1, "seed": 0, **options}).score_answer
    except (ValueError, TypeError, AssertionError) as error:
        raise RewardError(
            f"reasoning-gym cannot score {name!r} with options {dict(options)}: {error}"
        ) from error
