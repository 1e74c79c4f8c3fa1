from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from headrace.data.rendering import Renderer, make_char_tokenizer
from headrace.envs.single_turn import SingleTurn
from headrace.errors import TaskError
from headrace.types import NO_KV, Completion, ForkPoint, Pivot, Sampling, Task, Turn


class Parrot:
    """A policy that answers with fixed token ids and remembers what it was asked."""

    def __init__(self, answer_ids: list[int]) -> None:
        self.answer_ids = answer_ids
        self.asked: list[tuple[list[int], Sampling]] = []

    async def sample(self, prompt_ids: np.ndarray, sampling: Sampling) -> Turn:
        self.asked.append((prompt_ids.tolist(), sampling))
        num_tokens = len(self.answer_ids)
        completion = Completion(
            token_ids=np.array(self.answer_ids, dtype=np.int32),
            logprobs=np.zeros(num_tokens, dtype=np.float32),
            versions=np.zeros(num_tokens, dtype=np.int32),
            finish_reason="stop",
            kv_versions=NO_KV,
        )
        return Turn(prompt_ids=prompt_ids, completion=completion, sampling=sampling, seed=1, engine="parrot")


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    make_char_tokenizer(tmp_path, "abc")
    return Renderer.from_directory(tmp_path)


def test_one_turn_becomes_one_trajectory(renderer: Renderer) -> None:
    policy = Parrot([6, 5, 2])
    sampling = Sampling(max_tokens=8, stop_ids=renderer.stop_ids)
    (trajectory,) = asyncio.run(SingleTurn(renderer, sampling).run(Task(id="t/0", prompt="ab"), policy))
    assert policy.asked == [([4, 5], sampling)]
    assert trajectory.text == "cb"
    assert len(trajectory.turns) == 1
    assert trajectory.turns[0].completion.token_ids.tolist() == [6, 5, 2]
    assert trajectory.trainable
    assert trajectory.rewards == {}


def test_attempts_of_one_group_share_their_question(renderer: Renderer) -> None:
    shown: list[np.ndarray] = []

    class Watching(Parrot):
        async def sample(self, prompt_ids: np.ndarray, sampling: Sampling) -> Turn:
            shown.append(prompt_ids)
            return await super().sample(prompt_ids, sampling)

    environment = SingleTurn(renderer, Sampling(max_tokens=8))
    for task in (first := Task(id="t/0", prompt="ab"), first, Task(id="t/1", prompt="c"), first):
        asyncio.run(environment.run(task, Watching([2])))
    assert shown[0] is shown[1]
    assert [ids.tolist() for ids in shown] == [[4, 5], [4, 5], [6], [4, 5]]


@pytest.mark.parametrize(("max_context", "max_tokens"), [(3, 1), (9, 7), (10, 8), (100, 8)])
def test_completion_is_cut_to_the_context(renderer: Renderer, max_context: int, max_tokens: int) -> None:
    policy = Parrot([2])
    environment = SingleTurn(renderer, Sampling(max_tokens=8), max_context)
    asyncio.run(environment.run(Task(id="t/0", prompt="ab"), policy))
    assert policy.asked[0][1] == Sampling(max_tokens=max_tokens)


def test_prompt_that_fills_the_context_is_refused(renderer: Renderer) -> None:
    policy = Parrot([2])
    environment = SingleTurn(renderer, Sampling(max_tokens=8), 4)
    with pytest.raises(TaskError, match=r"task t/7 has a prompt of 4 tokens.*context of 4: shorten"):
        asyncio.run(environment.run(Task(id="t/7", prompt="abca"), policy))
    assert policy.asked == []


def test_a_branch_goes_on_from_its_pivot_and_is_judged_as_a_whole(renderer: Renderer) -> None:
    pivot = Pivot(
        prompt_ids=np.array([4, 5], dtype=np.int32),
        prefix_ids=np.array([6, 4, 4], dtype=np.int32),
        depth=0.5,
        fork=ForkPoint(request_id="0/0/0", num_tokens=5, version=0),
        engine="parrot",
    )
    policy = Parrot([6, 2])
    env = SingleTurn(renderer, Sampling(max_tokens=8, stop_ids=renderer.stop_ids))
    (trajectory,) = asyncio.run(env.run(Task(id="t/0@0/0:3", prompt="ab", pivot=pivot), policy))
    (asked, sampling) = policy.asked[0]
    assert asked == [4, 5, 6, 4, 4] and sampling.max_tokens == 5
    assert trajectory.text == "caac"
    assert trajectory.turns[0].completion.token_ids.tolist() == [6, 2]
