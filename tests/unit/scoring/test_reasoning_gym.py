from __future__ import annotations

import pytest

from headrace.data.tasks import from_reasoning_gym
from headrace.errors import RewardError
from headrace.scoring.reasoning_gym import extract_answer, reasoning_gym_reward, score
from headrace.wire import decode, encode

pytest.importorskip("reasoning_gym")


def columns(name: str, count: int) -> dict[str, list]:
    """A task's columns as a scorer in another process gets them."""
    task = decode(encode(from_reasoning_gym(name, size=3, seed=1).task(0)))
    return {key: [value] * count for key, value in task.columns.items()}


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "prime_factorization"])
def test_right_answers_score_one_and_nonsense_little(name: str) -> None:
    given = columns(name, 4)
    right = given["answer"][0]
    completions = [right, f"so <answer> 0 </answer>, no: <answer>{right}</answer>.", "zz", ""]
    scores = reasoning_gym_reward(name)(completions=completions, **given)
    assert scores[:2] == [1.0, 1.0]
    assert max(scores[2:]) < 0.1
    assert score(completions=completions, **given) == scores
    chats = [[{"role": "assistant", "content": text}] for text in completions]
    assert score(completions=chats, **given) == scores


def test_an_entry_that_cannot_be_scored_is_an_error() -> None:
    given = columns("n_queens", 1)
    with pytest.raises(KeyError, match="valid_answers"):
        reasoning_gym_reward("n_queens")(completions=["zz"], **{**given, "metadata": [{}]})


def test_unknown_generator() -> None:
    with pytest.raises(RewardError, match="'no_such'"):
        reasoning_gym_reward("no_such")
    assert reasoning_gym_reward("gcd", options={"size": 5})


def test_extract_answer() -> None:
    assert extract_answer("  7 \n") == "7"
    assert extract_answer("<answer>1</answer> <answer>\n2 </answer> x") == "2"
    assert extract_answer("<answer>1") == "<answer>1"
