"""Each promise of recorded scores, broken once: the checker names it, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.data.record_checks import Limits
from headrace.data.score_checks import step_faults, teacher_faults
from headrace.types import ScoreColumn, TeacherScores

LIMITS = Limits(vocab_size=10, newest_version=4)
TOKENS = np.array([3, 1, 4], dtype=np.int32)
TURNS = (4, 6)
"""Sampled tokens of two turns."""


def steps(ends: object, scores: object, source: str = "process") -> ScoreColumn:
    return ScoreColumn(
        source=source,
        group=0,
        attempt=0,
        step_ends=np.array(ends, dtype=np.int32),
        step_scores=np.array(scores, dtype=np.float32),
    )


SOUND_STEPS = (steps([2, 4], [0.5, -0.5]), steps([7], [0.1]), steps([10], [0.9]))
LONG_ENDS = replace(SOUND_STEPS[0], step_ends=np.array([2, 4], dtype=np.int64))
BROKEN_STEPS = {
    "a score too few": ([steps([2, 4, 10], [0.5, 0.5])], "2 scores for 3 steps"),
    "no scores": ([replace(SOUND_STEPS[0], step_scores=None)], "step_scores is missing"),
    "no ends": ([replace(SOUND_STEPS[0], step_ends=None)], "step_ends is missing"),
    "ends of another type": ([LONG_ENDS], "step_ends is int64"),
    "scores of another shape": ([steps([10], [[0.5, 0.5]])], "step_scores is float32 of shape (1, 2)"),
    "a score that is no numbe": ([steps([4, 10], [0.5, np.nan])], "step 1 has the score nan"),
    "a score without bounds": ([steps([4, 10], [np.inf, 0.5])], "step 0 has the score inf"),
    "versions of other steps": (
        [replace(SOUND_STEPS[0], versions=np.zeros(3, np.int32))], "versions are int32 of shape (3,), for 2 steps"),
    "a judge from before": (
        [replace(SOUND_STEPS[0], versions=np.array([0, -1], np.int32))], "a step was judged by version -1"),
    "an end before the first token": ([steps([0, 4, 10], [1, 1, 1])], "step 0 ends at token 0"),
    "ends that fall": ([steps([4, 3], [1, 1])], "step 1 ends at token 3, the one before it at 4"),
    "steps told twice": ([SOUND_STEPS[0], *SOUND_STEPS], "step 2 ends at token 2, the one before it at 4"),
    "an end behind the last token": ([steps([4, 11], [1, 1])], "step 1 ends at token 11, the attempt has 10"),
    "a step over two turns": ([steps([2, 10], [1, 1])], "begins before token 4 and ends behind it"),
    "steps that are not all there": (SOUND_STEPS[:2], "steps end at token 7 of 10, and none is said to be"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_STEPS)
def test_each_broken_step_column_is_named_once(name):
    columns, text = BROKEN_STEPS[name]
    (fault,) = step_faults(columns, TURNS, is_settled=True)
    assert text in fault


def test_sound_steps_have_no_fault():
    assert not list(step_faults(SOUND_STEPS, TURNS, is_settled=True))
    # An attempt that goes on, or whose judge was late, has some of them.
    assert not list(step_faults(SOUND_STEPS[:1], TURNS, is_settled=False))
    # Only the process judge is asked turn by turn.
    assert not list(step_faults([steps([10], [1.0], "own")], TURNS, is_settled=True))
    # Of an attempt of which a turn is lost, nobody knows where it ends.
    assert not list(step_faults([steps([99], [1.0])], None, is_settled=True))


def top(ids: object, logprobs: object) -> dict[str, np.ndarray]:
    return {"top_ids": np.array(ids, dtype=np.int32), "top_logprobs": np.array(logprobs, dtype=np.float32)}


INF = np.inf
TOP = [[0, 0], [1, 7], [2, 0]], [[-INF, -INF], [-0.5, -1.5], [-0.25, -INF]]
SOUND = TeacherScores(
    logprobs=np.array([0, -0.5, -2.0], dtype=np.float32), teacher="math", version=3, **top(*TOP)
)


def own(*logprobs: float) -> TeacherScores:
    return replace(SOUND, logprobs=np.array(logprobs, dtype=np.float32), top_ids=None, top_logprobs=None)


def entries(*, ids: object = TOP[0], logprobs: object = TOP[1]) -> TeacherScores:
    return replace(SOUND, **top(ids, logprobs))


BLANK = [-INF, -INF]
BROKEN_TEACHER = {
    "a logprob too few": (own(0, -1), "logprobs are float32 of shape (2,), for 3 tokens"),
    "logprobs of another type": (replace(SOUND, logprobs=np.zeros(3)), "logprobs are float64"),
    "a logprob that is no numbe": (own(0, np.nan, -1), "token 1 has the logprob nan"),
    "a logprob above 0": (own(0, -1, 0.5), "token 2 has the logprob 0.5"),
    "a logprob of the first token": (own(-1, -1, -1), "token 0 has the logprob -1.0, though nothing"),
    "a version to come": (replace(SOUND, version=5), "of version 5, the run has reached 4"),
    "a version from before": (replace(SOUND, version=-1), "of version -1"),
    "nobody": (replace(SOUND, teacher=""), "has no name"),
    "ids without logprobs": (replace(SOUND, top_logprobs=None), "ids or log-probabilities are missing"),
    "ids of too few tokens": (entries(ids=TOP[0][:2], logprobs=TOP[1][:2]), "top_ids are int32 of shape (2, 2)"),
    "logprobs of other entries": (entries(logprobs=[[-1], [-1], [-1]]), "top_logprobs are float32 of shape (3, 1)"),
    "an entry above 0": (entries(logprobs=[BLANK, [-0.5, 0.3], BLANK]), "a likeliest one with the logprob 0.3"),
    "an entry that is no numbe": (entries(logprobs=[BLANK, [-0.5, np.nan], BLANK]), "with the logprob nan"),
    "entries of the first token": (entries(logprobs=[[-9, -INF], *TOP[1][1:]]), "token 0 has likeliest ones"),
    "more than everything": (entries(logprobs=[BLANK, [-0.5, -0.1], BLANK]), "at 1 have the probability 1.5114"),
    "an id beyond the vocabulary": (entries(ids=[[0, 0], [1, 10], [2, 0]]), "at 1 hold id 10, the vocabulary has 10"),
    "an id below 0": (entries(ids=[[0, 0], [1, 7], [-3, 0]]), "at 2 hold id -3"),
    "an id twice": (entries(ids=[[0, 0], [1, 1], [2, 0]]), "at 1 hold an id twice"),
    "a token unlike its entry": (
        replace(SOUND, logprobs=np.array([0, -0.7, -2], np.float32)), "token 1 is 1 with the logprob -0.7000, which"),
    "a token likelier than the likeliest": (
        replace(SOUND, logprobs=np.array([0, -0.5, -0.1], np.float32)), "token 2 is 4 with the logprob -0.1000, which"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_TEACHER)
def test_each_broken_teacher_score_is_named_once(name):
    scores, text = BROKEN_TEACHER[name]
    (fault,) = teacher_faults([SOUND, scores], [TOKENS, TOKENS], LIMITS)
    assert fault.startswith("sample 1: ") and text in fault


def test_sound_teacher_scores_have_no_fault():
    assert not list(teacher_faults([SOUND, own(0, -1, -2)], [TOKENS, TOKENS], LIMITS))
    # Of an attempt that is lost in part, what does not depend on its tokens is checked.
    assert not list(teacher_faults([own(0, -1)], None, LIMITS))
    assert list(teacher_faults([own(0, 1)], None, LIMITS))


def test_scores_of_another_attempt_are_named():
    assert list(teacher_faults([SOUND], [TOKENS, TOKENS], LIMITS)) == [
        "1 sequences are scored, the attempt has 2 samples"
    ]
    (fault,) = teacher_faults([SOUND], [np.array([3, 7, 4], dtype=np.int32)], LIMITS)
    assert "token 1 is 7 with the logprob -0.5000" in fault
