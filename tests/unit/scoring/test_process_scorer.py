from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.errors import RewardError
from headrace.scoring.process_scorer import ProcessScorer, StepFunction
from headrace.types import Task

TASK = Task(id="7", prompt="p", columns={"answer": "bd"})
IDS = np.array([0, 1, 2, 3, 4], np.int32)
ENDS = np.array([3, 5])


def letters(ids):
    return "".join("abcdefgh"[i] for i in ids)


def ask(function, *, threaded=False, num_known=0):
    async def main():
        core = StepFunction(function, name="judge", decode=letters)
        scorer = ProcessScorer(core, threaded=threaded)
        rest = {"num_prompt": 1, "num_known": num_known, "last": False}
        scores = await scorer.score_steps("0/0", TASK, IDS, ENDS, **rest)
        return scores, await scorer.status()

    return asyncio.run(main())


@pytest.mark.parametrize("threaded", [False, True])
def test_a_function_gets_what_it_declares_and_scores_every_step(threaded):
    def judge(steps, answer, prompt):
        assert (prompt, steps, answer) == ("a", ["bc", "de"], "bd")
        return [float(len(step)) for step in steps]

    scores, status = ask(judge, threaded=threaded)
    assert scores.tolist() == [2.0, 2.0]
    assert scores.dtype == np.float32
    assert status.progress == 2
    assert set(status.seconds) == {"loading", "working", "idle-no-work"}


def test_what_is_known_is_left_out():
    scores, _ = ask(lambda token_ids, ends: [token_ids[end - 1] for end in ends], num_known=1)
    assert scores.tolist() == [4.0]


def test_a_function_that_raises_or_wants_what_is_not_there_is_named():
    def broken(steps):
        raise KeyError("x")

    with pytest.raises(RewardError, match=r"process failed on attempt 0/0: KeyError"):
        ask(broken)
    with pytest.raises(RewardError, match=r"judge asks for 'solution', which task 7 has not"):
        ask(lambda solution: [0.0])


def test_an_answer_of_the_wrong_length_keeps_it_for_whoever_counts():
    scores, _ = ask(lambda steps: [0.0], num_known=0)
    assert scores.shape == (1,)
