"""Scores of teachers and of steps, from the journal and from checkpoints, as ``replay --check`` judges them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace import wire
from headrace.data.record_checks import Limits
from headrace.replay.check import check_recording
from headrace.runtime.recording import Recording
from headrace.runtime.rollout import turn_seed
from headrace.runtime.state import RunState
from headrace.types import Completion, Sampling, ScoreColumn, Task, TeacherScores, Turn

RUN_SEED = 5
PROMPT = np.array([7, 8], dtype=np.int32)


def a_turn(attempt: int) -> Turn:
    completion = Completion(
        token_ids=np.array([1, 2, 3, 4], dtype=np.int32),
        logprobs=np.full(4, -1.0, dtype=np.float32),
        versions=np.zeros(4, dtype=np.int32),
        finish_reason="length",
        kv_versions=np.array([[0, 5]], dtype=np.int32),
    )
    seed = turn_seed(RUN_SEED, 0, attempt, 0)
    return Turn(
        prompt_ids=PROMPT, completion=completion, sampling=Sampling(max_tokens=4), seed=seed, engine="e"
    )


def steps(attempt: int, ends: list[int]) -> ScoreColumn:
    return ScoreColumn(
        source="process",
        group=0,
        attempt=attempt,
        step_ends=np.array(ends, dtype=np.int32),
        step_scores=np.zeros(len(ends), dtype=np.float32),
    )


def taught(attempt: int, teacher: str = "math") -> ScoreColumn:
    logprobs = np.array([0, -1, -1, -1, -1, -1], dtype=np.float32)
    scores = TeacherScores(logprobs=logprobs, teacher=teacher)
    return ScoreColumn(source="teacher", group=0, attempt=attempt, teacher=(scores,))


def records(*, task_teacher: str = "math", missing: tuple = (), more: tuple[ScoreColumn, ...] = ()) -> list:
    """A group of two attempts with one turn each, whose steps are told in two pieces."""
    task = Task(id="t", prompt="p", columns={"teacher": task_teacher})
    found: list = [{"kind": "admit", "group": 0, "task": task, "attempts": 2, "version": 0}]
    for attempt in range(2):
        where = {"group": 0, "attempt": attempt}
        found += [
            {"kind": "turn", **where, "turn": 0, "value": a_turn(attempt)},
            {"kind": "scores", "columns": [steps(attempt, [2])]},
            {"kind": "episode", **where, "trajectories": [[[0], "text", "policy", True]]},
        ]
    found.append({"kind": "scores", "columns": [steps(0, [4]), steps(1, [3, 4]), taught(0), taught(1)]})
    found.append({"kind": "scores", "columns": list(more)})
    return [*found, {"kind": "scored", "group": 0, "returns": [0.0, 1.0], "missing": list(missing)}]


def checked(written: list, *, checkpoint_at: int | None = None):
    """The report; with ``checkpoint_at``, of what a checkpoint before that record holds and the records behind it."""
    recording, first = Recording(), 0
    if checkpoint_at is not None:
        state, first = RunState(), checkpoint_at
        for record in written[:first]:
            state.apply(record)
        recording.add_state(wire.decode(wire.encode(state.snapshot())))
    for record in written[first:]:
        recording.add(record)
    return check_recording(recording, Limits(vocab_size=10, newest_version=0), seed=RUN_SEED)


def faults(written: list, **how: int) -> list[tuple[str, str, str]]:
    return [tuple(found) for found in checked(written, **how).faults]


@pytest.mark.parametrize("checkpoint_at", [None, *range(1, len(records()) + 1)])
def test_sound_scores_are_looked_at_and_have_no_fault(checkpoint_at):
    report = checked(records(), checkpoint_at=checkpoint_at)
    assert not report.faults
    assert report.num_checked["steps"] == report.num_checked["teacher"] == 2


@pytest.mark.parametrize("checkpoint_at", [None, len(records())])
def test_bad_scores_are_named_with_their_attempt(checkpoint_at):
    written = records()
    (column,) = [c for c in written[-3]["columns"] if c.source == "process" and c.attempt == 1]
    bad_teacher = replace(taught(0).teacher[0], logprobs=np.full(6, np.nan, np.float32))
    written[-3]["columns"] = [
        steps(0, [4]),
        replace(column, step_ends=np.array([3, 9], np.int32)),
        replace(taught(0), teacher=(bad_teacher,)),
        taught(1),
    ]
    found = faults(written, checkpoint_at=checkpoint_at)
    assert [(where, check) for where, check, _ in found] == [
        ("attempt 0/0", "teacher"),
        ("attempt 0/1, process", "steps"),
    ]
    assert found[0][2] == "sample 0: token 0 has the logprob nan"
    assert found[1][2] == "step 2 ends at token 9, the attempt has 4"


def test_steps_that_are_lost_are_named_and_those_that_were_late_are_not():
    written = records()
    written[-3]["columns"] = [steps(0, [4]), taught(0), taught(1)]
    ((where, _, text),) = faults(written)
    assert (where, text) == (
        "attempt 0/1, process",
        "its steps end at token 2 of 4, and none is said to be missing",
    )
    written[-1]["missing"] = [("process", 1, "late")]
    assert not faults(written)


def test_scores_of_an_attempt_there_is_not_are_named():
    ((where, check, text),) = faults(records(more=(steps(5, [4]),)))
    assert (where, check) == ("group 0", "group")
    assert text == "process scored attempt 5, but the group has 2 attempts"


def test_scores_that_were_given_twice_are_named():
    ((_, _, text),) = faults(records(more=(taught(1),)))
    assert text == "teacher scored attempt 1 2 times"


def test_a_teacher_that_is_not_the_tasks_is_named():
    ((_, _, text),) = faults(records(task_teacher="code"))
    assert text == "its task names the teacher code, but the scores are of math"


def test_a_group_that_two_teachers_scored_is_named():
    written = records()
    written[-3]["columns"][-1] = taught(1, "code")
    assert any("some of its attempts are scored by code and math" in text for _, _, text in faults(written))
