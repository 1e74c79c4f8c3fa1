"""Where the steps of a sampled text end. Pure, and stable while the text grows.

In: sampled tokens, their log-probabilities and a rule. Out: how many tokens have been sampled where each step ends.
A rule looks only backwards, so what it says of the first tokens never changes as more arrive: steps found in a
stream are those of the finished text. Three rules, as ``scoring.steps`` writes them:

    delimiter:\\n    a step ends with a token whose text contains this one, unless nothing else is in it yet
    tokens:32       a step ends every so many tokens
    entropy:2.0     a step begins at a token whose surprisal, -log p of what was drawn, is above so many nats, but no
                    sooner than ``MIN_STEP_TOKENS`` after the last

Surprisal stands in for the entropy of the distribution drawn from: its expectation is that entropy, it is in every
record already, and no executor has to compute or carry another figure a token.

Shape legend: L sampled tokens, C steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from headrace.errors import ConfigError
from headrace.types import EpisodeGroup, ScoreColumn

MIN_STEP_TOKENS = 4
"""Surprising tokens often come in runs, which are one event."""
PROCESS = "process"
"""The source of step scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRule:
    kind: Literal["delimiter", "tokens", "entropy"]
    num_tokens: int = 0
    """Of ``tokens``: the length of a step."""
    nats: float = 0.0
    """Of ``entropy``: surprisal above which a step begins."""
    delimiter_ids: tuple[int, ...] = ()
    """Of ``delimiter``: tokens that end a step."""


def parse_rule(text: str, ids_containing: Callable[[str], tuple[int, ...]]) -> StepRule:
    """``ids_containing`` finds the tokens in whose text another occurs."""
    kind, _, value = text.partition(":")
    try:
        if kind == "tokens" and int(value) > 0:
            return StepRule(kind="tokens", num_tokens=int(value))
        if kind == "entropy" and float(value) > 0:
            return StepRule(kind="entropy", nats=float(value))
    except ValueError:
        kind = ""
    if kind == "delimiter" and value:
        delimiter = value.replace("\\n", "\n").replace("\\t", "\t")
        ids = ids_containing(delimiter)
        if not ids:
            raise ConfigError(
                f"scoring.steps: no token of the model contains {delimiter!r}; use another delimiter"
            )
        return StepRule(kind="delimiter", delimiter_ids=ids)
    raise ConfigError(
        f"scoring.steps is {text!r}: write delimiter:TEXT, tokens:N or entropy:NATS, for example delimiter:\\n"
    )


def split(token_ids: np.ndarray, logprobs: np.ndarray, rule: StepRule, *, finished: bool) -> np.ndarray:
    """int32 [C], where each step ends. Unfinished, the tokens after the last end are left for later; finished, they
    are a step too."""
    num_tokens = len(token_ids)
    if rule.kind == "tokens":
        ends = np.arange(rule.num_tokens, num_tokens + 1, rule.num_tokens)
    elif rule.kind == "delimiter":
        ends = _after_delimiters(np.isin(token_ids, rule.delimiter_ids))
    else:
        ends = _before_spikes(np.flatnonzero(-logprobs > rule.nats))
    ends = ends.astype(np.int32)
    if finished and num_tokens and (not len(ends) or ends[-1] < num_tokens):
        ends = np.append(ends, np.int32(num_tokens))
    return ends


def _after_delimiters(is_delimiter: np.ndarray) -> np.ndarray:
    """A delimiter right after another one, or at the very start, belongs to the step it begins."""
    before = np.concatenate([np.ones(1, dtype=bool), is_delimiter[:-1]])
    return np.flatnonzero(is_delimiter & ~before) + 1


def _before_spikes(places: np.ndarray) -> np.ndarray:
    ends, last = [], 0
    for place in places.tolist():
        if place - last >= MIN_STEP_TOKENS:
            ends.append(place)
            last = place
    return np.array(ends, dtype=np.int32)


def in_order(column: ScoreColumn, turn_tokens: Sequence[int], order: Sequence[int]) -> ScoreColumn:
    """A column told turn after turn as they were sampled, with the turns (by number) as trajectories have them: one
    after the other, and without those that are in none. It ends where the first turn was not told to its end."""
    assert column.step_ends is not None and column.step_scores is not None
    starts = np.cumsum([0, *turn_tokens]).tolist()
    ends, steps, before = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)], 0
    for number in order:
        start, stop = starts[number], starts[number + 1]
        inside = np.flatnonzero((start < column.step_ends) & (column.step_ends <= stop))
        ends.append(column.step_ends[inside] - start + before)
        steps.append(inside)
        before += stop - start
        if stop > start and (not len(inside) or ends[-1][-1] < before):
            break
    kept = np.concatenate(steps)
    return replace(
        column,
        step_ends=np.concatenate(ends).astype(np.int32),
        step_scores=column.step_scores[kept],
        versions=None if column.versions is None else column.versions[kept],
    )


def continued(known: ScoreColumn, more: ScoreColumn) -> ScoreColumn:
    """Both columns of one attempt as one; the second goes on where the first ends."""
    assert known.step_ends is not None and known.step_scores is not None
    assert more.step_ends is not None and more.step_scores is not None
    changes = known.versions is not None or more.versions is not None
    return replace(
        known,
        step_ends=np.concatenate([known.step_ends, more.step_ends]),
        step_scores=np.concatenate([known.step_scores, more.step_scores]),
        versions=np.concatenate([judge_versions(known), judge_versions(more)]) if changes else None,
    )


def judge_versions(column: ScoreColumn) -> np.ndarray:
    """int32 [C], or [1]: of the judge when it gave each score."""
    if column.versions is not None:
        return column.versions
    return np.zeros(1 if column.step_ends is None else len(column.step_ends), dtype=np.int32)


def trajectory_steps(group: EpisodeGroup, attempt: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """``step_borders`` of each trajectory of an attempt, counted in its own sampled tokens; none where not all steps
    were scored in time."""
    ends, scores = step_borders(group, attempt)
    if not len(ends):
        return []
    (episode,) = [e for e in group.episodes if e.attempt == attempt]
    found, start = [], 0
    for trajectory in episode.trajectories:
        stop = start + sum(turn.completion.num_tokens for turn in trajectory.turns)
        inside = (start < ends) & (ends <= stop)
        found.append((ends[inside] - np.int32(start), scores[inside]))
        start = stop
    return found


def step_borders(group: EpisodeGroup, attempt: int) -> tuple[np.ndarray, np.ndarray]:
    """(ends int32 [C], scores float32 [C]) of an attempt whose steps were all scored in time; empty otherwise. Ends
    count the attempt's sampled tokens, one trajectory after the other, so a border is a place to fork at."""
    (episode,) = [e for e in group.episodes if e.attempt == attempt]
    for column in group.scores:
        if column.source == PROCESS and column.attempt == attempt and is_whole(column, episode.num_tokens):
            assert column.step_ends is not None and column.step_scores is not None
            return column.step_ends, column.step_scores
    return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)


def is_whole(column: ScoreColumn, num_tokens: int) -> bool:
    """Whether a column says all there is to say of an attempt of ``num_tokens``."""
    if column.step_ends is None:
        return True
    return (int(column.step_ends[-1]) if len(column.step_ends) else 0) == num_tokens
