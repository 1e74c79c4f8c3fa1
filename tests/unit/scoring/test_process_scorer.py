from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from headrace.errors import RewardError, ScoreError
from headrace.scoring.process_scorer import ProcessScorer, StepFunction
from headrace.types import StepQuestion, StepScores, Task

TASK = Task(id="7", prompt="p", columns={"answer": "bd"})
IDS = np.array([0, 1, 2, 3, 4], np.int32)
ENDS = np.array([3, 5])


def letters(ids):
    return "".join("abcdefgh"[i] for i in ids)


def question(num_known=0, attempt="0/0"):
    return StepQuestion(
        attempt=attempt,
        task=TASK,
        token_ids=IDS,
        num_prompt=1,
        ends=ENDS,
        num_known=num_known,
        last=False,
    )


def ask(function, *, threaded=False, num_known=0):
    async def main():
        core = StepFunction(function, name="judge", decode=letters)
        scorer = ProcessScorer(core, threaded=threaded)
        said = await scorer.score_steps(question(num_known))
        return said.scores, await scorer.status()

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


def test_a_function_that_changes_says_which_version_judged():
    def judge(steps):
        judge.version += 1
        return [float(judge.version)] * len(steps)

    judge.version = 3

    async def main():
        scorer = ProcessScorer(StepFunction(judge, name="judge", decode=letters), threaded=False)
        return [await scorer.score_steps(question(attempt=name)) for name in "ab"]

    assert [said.version for said in asyncio.run(main())] == [3, 4]


def test_what_is_known_is_left_out():
    scores, _ = ask(lambda token_ids, ends: [token_ids[end - 1] for end in ends], num_known=1)
    assert scores.tolist() == [4.0]


def test_a_function_that_raises_or_wants_what_is_not_there_is_named():
    def broken(steps):
        raise KeyError("x")

    said = r"process failed on attempt 0/0: KeyError: 'x' \(test_process_scorer\.py:\d+\)$"
    with pytest.raises(RewardError, match=said):
        ask(broken)
    with pytest.raises(RewardError, match=r"judge asks for 'solution', which task 7 has not"):
        ask(lambda solution: [0.0])


@pytest.mark.parametrize("num_known", [0, 1, 2])
def test_an_answer_of_the_wrong_length_is_counted_from_the_first_step(num_known):
    with pytest.raises(ScoreError, match=r"judge returned 1 scores for the 2 steps of attempt 0/0"):
        ask(lambda steps: [0.0], num_known=num_known)


class Passes:
    """Remembers what came together; the attempt ``bad`` is at fault."""

    def __init__(self):
        self.passes = []

    def score(self, questions):
        self.passes.append([q.attempt for q in questions])
        return [
            ValueError("odd") if q.attempt == "bad" else StepScores(scores=np.zeros(2, np.float32))
            for q in questions
        ]

    def counters(self):
        return {}


def test_questions_that_wait_share_a_pass_and_a_fault_is_its_own():
    async def main():
        core = Passes()
        scorer = ProcessScorer(core)
        names = ["a", "bad", "c"]
        return core.passes, await asyncio.gather(
            *(scorer.score_steps(question(attempt=name)) for name in names), return_exceptions=True
        )

    passes, (first, second, third) = asyncio.run(main())
    assert passes == [["a", "bad", "c"]]
    assert first.scores.shape == third.scores.shape == (2,)
    assert isinstance(second, RewardError)
    assert "attempt bad: ValueError: odd" in str(second)


def test_what_is_given_up_while_it_waits_is_not_computed():
    async def main():
        core = Passes()
        scorer = ProcessScorer(core, threaded=False)
        asked = [asyncio.create_task(scorer.score_steps(question(attempt=name))) for name in "ab"]
        await asyncio.sleep(0)
        asked[0].cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return core.passes

    assert asyncio.run(main()) == [["b"]]


def test_what_is_given_up_behind_a_pass_that_hangs_does_not_pile_up():
    hangs, ends = threading.Event(), threading.Event()

    class Hangs(Passes):
        def score(self, questions):
            hangs.set()
            assert ends.wait(30)
            return super().score(questions)

    async def main():
        scorer = ProcessScorer(Hangs(), threaded=True)
        first = asyncio.create_task(scorer.score_steps(question(attempt="a")))
        await asyncio.to_thread(hangs.wait, 30)
        others = [asyncio.create_task(scorer.score_steps(question(attempt=str(i)))) for i in range(20)]
        await asyncio.sleep(0)
        for asked in others:
            asked.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert not scorer._waiting
        ends.set()
        await first
        await scorer.close()

    asyncio.run(main())


def test_the_first_fault_of_a_kind_is_logged_with_its_traceback():
    def broken(steps):
        raise KeyError("x")

    async def main():
        scorer = ProcessScorer(StepFunction(broken, name="judge", decode=letters), log=logged.append)
        asked = (scorer.score_steps(question(attempt=name)) for name in "ab")
        await asyncio.gather(*asked, return_exceptions=True)

    logged = []
    asyncio.run(main())
    (text,) = logged
    assert 'raise KeyError("x")' in text and "in broken" in text
