from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.rendering import Renderer, make_char_tokenizer
from headrace.data.steps import (
    StepRule,
    continued,
    in_order,
    judge_versions,
    parse_rule,
    split,
    step_borders,
)
from headrace.errors import ConfigError
from headrace.types import (
    NO_KV,
    Completion,
    Episode,
    EpisodeGroup,
    Sampling,
    ScoreColumn,
    Task,
    Trajectory,
    Turn,
)

NEWLINE = StepRule(kind="delimiter", delimiter_ids=(9, 8))
RULES = [NEWLINE, StepRule(kind="tokens", num_tokens=3), StepRule(kind="entropy", nats=2.0)]


def cut(token_ids, rule, *, surprisal=(), finished=True):
    logprobs = -np.array(surprisal or np.zeros(len(token_ids)), np.float32)
    return split(np.array(token_ids, np.int32), logprobs, rule, finished=finished).tolist()


def test_delimiters_end_steps_and_do_not_make_empty_ones():
    assert cut([1, 2, 9, 3, 9], NEWLINE) == [3, 5]
    assert cut([9, 1, 9, 9, 2, 8, 3], NEWLINE) == [3, 6, 7]
    assert cut([9, 9], NEWLINE) == [2]


def test_token_counts_and_the_rest():
    assert cut(range(7), RULES[1]) == [3, 6, 7]
    assert cut(range(6), RULES[1]) == [3, 6]
    assert cut(range(7), RULES[1], finished=False) == [3, 6]


def test_a_step_begins_at_a_surprise_but_not_at_every_one_in_a_run():
    surprisal = [3, 0, 0, 0, 3, 3, 0, 0, 0, 0, 2.5, 0]
    assert cut([0] * 12, RULES[2], surprisal=surprisal) == [4, 10, 12]


@pytest.mark.parametrize("rule", RULES)
def test_nothing_was_sampled(rule):
    assert cut([], rule) == []


@given(
    tokens=st.lists(st.tuples(st.integers(0, 9), st.floats(0, 4)), max_size=30),
    length=st.integers(0, 30),
    rule=st.sampled_from(RULES),
)
def test_what_is_said_of_a_prefix_never_changes(tokens, length, rule):
    ids, surprisal = [t for t, _ in tokens], [s for _, s in tokens]
    early = cut(ids[:length], rule, surprisal=surprisal[:length], finished=False)
    whole = cut(ids, rule, surprisal=surprisal)
    assert whole[: len(early)] == early
    assert whole == sorted(set(whole))
    assert not ids or whole[-1] == len(ids)


def test_rules_are_read_and_refused_in_words(tmp_path):
    make_char_tokenizer(tmp_path, "ab\n")
    renderer = Renderer.from_directory(tmp_path)
    newline = renderer.encode("\n").tolist()
    assert parse_rule("delimiter:\\n", renderer.ids_containing).delimiter_ids == tuple(newline)
    assert parse_rule("tokens:32", renderer.ids_containing).num_tokens == 32
    assert parse_rule("entropy:2.5", renderer.ids_containing).nats == 2.5
    with pytest.raises(ConfigError, match=r"scoring\.steps: no token of the model contains"):
        parse_rule("delimiter:;", renderer.ids_containing)
    for wrong in ("tokens:0", "tokens:x", "entropy:-1", "delimiter:", "lines", "entropy"):
        with pytest.raises(ConfigError, match=r"scoring\.steps is .*write delimiter:TEXT, tokens:N"):
            parse_rule(wrong, renderer.ids_containing)


def test_borders_are_those_of_wholly_scored_attempts():
    completion = Completion(
        token_ids=np.arange(5, dtype=np.int32),
        logprobs=np.zeros(5, np.float32),
        versions=np.zeros(5, np.int32),
        finish_reason="stop",
        kv_versions=NO_KV,
    )
    turn = Turn(
        prompt_ids=np.zeros(1, np.int32),
        completion=completion,
        sampling=Sampling(max_tokens=8),
        seed=0,
        engine="engine-0",
    )
    task = Task(id="0", prompt="p")
    episodes = tuple(
        Episode(group=3, attempt=a, task=task, trajectories=(Trajectory(turns=(turn,), text=""),))
        for a in range(3)
    )
    columns = tuple(
        ScoreColumn(
            source="process",
            group=3,
            attempt=a,
            step_ends=np.array(ends, np.int32),
            step_scores=np.linspace(0, 1, len(ends), dtype=np.float32),
        )
        for a, ends in ((0, [2, 5]), (1, [2]))
    )
    group = EpisodeGroup(group=3, task=task, episodes=episodes, returns=(0.0,) * 3, scores=columns)
    ends, scores = step_borders(group, 0)
    assert ends.tolist() == [2, 5]
    assert scores.tolist() == [0.0, 1.0]
    assert [len(step_borders(group, a)[0]) for a in (1, 2)] == [0, 0]


def told(ends):
    return ScoreColumn(
        source="process",
        group=0,
        attempt=0,
        step_ends=np.array(ends, np.int32),
        step_scores=np.array(ends, np.float32) / 10,
    )


@pytest.mark.parametrize(
    ("ends", "order", "wanted", "scores"),
    [
        ([2, 4, 7, 9, 10], [0, 2, 1], [2, 4, 5, 8, 10], [2, 4, 10, 7, 9]),
        ([2, 4, 7, 9, 10], [2], [1], [10]),
        ([2, 4, 7, 9, 10], [3, 1], [3, 5], [7, 9]),
        ([2, 4, 7], [0, 2, 1], [2, 4], [2, 4]),
        ([2, 4, 7], [1, 0, 2], [3], [7]),
        ([2], [0, 1, 2], [2], [2]),
        ([], [0, 1, 2], [], []),
    ],
    ids=["all", "one", "an empty turn", "the second untold", "the first in part", "cut short", "nothing"],
)
def test_steps_follow_their_turns_into_the_order_of_trajectories(ends, order, wanted, scores):
    """Turns of 4, 5, 1 and 0 tokens; what comes behind a turn that was not told to its end is left out."""
    column = in_order(told(ends), [4, 5, 1, 0], order)
    assert column.step_ends.tolist() == wanted
    assert column.step_scores.tolist() == pytest.approx([score / 10 for score in scores])
    assert column.step_ends.dtype == np.int32 and column.step_scores.dtype == np.float32
    versions = replace(told(ends), versions=np.array(ends, np.int32))
    assert in_order(versions, [4, 5, 1, 0], order).versions.tolist() == scores


def test_columns_of_a_judge_that_changed_go_on_step_by_step():
    first, second = told([2, 4]), replace(told([7]), versions=np.array([3], np.int32))
    assert continued(first, told([7])).versions is None
    assert judge_versions(continued(first, second)).tolist() == [0, 0, 3]
    assert judge_versions(continued(second, told([]))).tolist() == [3]
    assert continued(first, second).step_ends.tolist() == [2, 4, 7]
