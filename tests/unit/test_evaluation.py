from __future__ import annotations

import pytest

from headrace.engines.scripted import ScriptedEngine
from headrace.errors import RolloutError
from headrace.evaluation import evaluate
from headrace.plan import virtual_clock
from headrace.types import Sampling, Task, Trajectory


class OneTurn:
    def __init__(self, prompt):
        self._prompt = prompt

    async def run(self, task, policy):
        turn = await policy.sample(self._prompt, Sampling(max_tokens=4))
        return (Trajectory(turns=(turn,), text=""),)


class Plain:
    def run(self, task, policy):
        return ()


class Raises:
    async def run(self, task, policy):
        raise KeyError("my bug")


class Scorer:
    async def score(self, task, episodes):
        return [{"one": 1.0} for _ in episodes]


def evaluated(environment):
    async def main():
        return await evaluate(
            engine=ScriptedEngine(),
            environment=environment,
            scorer=Scorer(),
            tasks=[Task(id="0", prompt="", columns={})],
            weights=None,
            num_samples=2,
            seed=0,
        )

    return virtual_clock.run(main())


def test_a_list_of_token_ids_is_a_prompt():
    assert evaluated(OneTurn([1, 2])).mean_return == 1.0


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (OneTurn("abc"), r"^environment: it gave policy\.sample the prompt 'abc'; give token ids"),
        (Plain(), r"^environment: Plain\.run returned a tuple .* async def run"),
        (Raises(), r"^environment: KeyError: 'my bug' \(test_evaluation\.py:\d+\)$"),
    ],
)
def test_an_environment_at_fault_is_named_as_in_training(environment, said):
    with pytest.raises(RolloutError, match=said):
        evaluated(environment)
