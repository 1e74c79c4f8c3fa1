"""Parts of the loss library that reach beyond the loss, in whole runs in one process on the demo's tiny model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from run_tools import SMALL, letters, train
from safetensors.torch import load_file

import headrace
from headrace import demo
from headrace.errors import ConfigError
from headrace.types import Trajectory

SETTINGS = {
    "run.steps": 6,
    **SMALL,
    "rollout.max_lag": 0,
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {**demo.prepare(tmp_path, warm_steps=10), **SETTINGS}


def steps(result):
    lines = (result.run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == "step"]


def same_weights(left, right):
    left, right = (load_file(result.model_dir / "model.safetensors") for result in (left, right))
    return all(torch.equal(left[name], right[name]) for name in right)


def test_a_run_on_running_means_that_dies_goes_on_with_the_same_ones(settings, die_after):
    settings = {**settings, "algo.advantage": "rae", "rollout.group_size": 1, "rollout.groups_per_step": 8}
    whole = train({**settings, "run.name": "whole"})
    die_after(5, lambda: train(settings))
    resumed = headrace.train(tasks=demo.tasks(64), reward=letters, resume="runs/run")
    means = {step["step"]: step.get("baseline_policy") for step in steps(whole)}
    assert means[1] is None and means[6] > 0
    assert {s["step"]: s.get("baseline_policy") for s in steps(resumed)}.items() <= means.items()
    assert same_weights(resumed, whole)


class Echoing:
    """Two turns: whatever was sampled, the environment answers with the task's own prompt, and asks again."""

    def __init__(self, renderer, sampling):
        self._renderer, self._sampling = renderer, sampling

    async def run(self, task, policy):
        shown = self._renderer.prompt_ids(task)
        first = await policy.sample(shown, self._sampling)
        again = np.concatenate([shown, first.completion.token_ids, shown]).astype(np.int32)
        second = await policy.sample(again, self._sampling)
        text = self._renderer.decode(second.completion.token_ids)
        return (Trajectory(turns=(first, second), text=text),)


ECHO = {"algo.options": {"echo.coef": 0.1}, "rollout.max_tokens": 6}


def test_an_environments_answers_are_trained_on_and_the_run_survives_a_kill(settings, die_after):
    settings = {**settings, **ECHO}
    whole = train({**settings, "run.name": "whole"}, environment=Echoing)
    die_after(5, lambda: train(settings, environment=Echoing))
    resumed = headrace.train(tasks=demo.tasks(64), reward=letters, environment=Echoing, resume="runs/run")
    assert same_weights(resumed, whole)
    without = train({**settings, "algo.options": {}, "run.name": "without"}, environment=Echoing)
    assert not same_weights(without, whole)
    (told, *_), (plain, *_) = (steps(result) for result in (whole, without))
    assert told["metrics"]["environment_tokens"] > 0 and told["metrics"]["environment_loss"] > 0
    # The first step starts from the same weights, and what is told of the sampled tokens is the same to the last bit.
    both = plain["metrics"].keys() - {"loss", "grad_norm"}
    assert {name: told["metrics"][name] for name in both} == {name: plain["metrics"][name] for name in both}


def test_one_turn_has_no_answers_and_is_refused(settings):
    with pytest.raises(ConfigError, match="attempts of one turn"):
        train({**settings, **ECHO})


IN_THE_REWARD = {
    "algo.advantage": "reinforce++",
    "algo.kl_coef": 0.2,
    "algo.options": {"kl.estimator": "k1", "kl.reference": "engine"},
}


def test_kl_inside_the_reward_changes_the_run_and_survives_a_kill(settings, die_after):
    settings = {**settings, **IN_THE_REWARD}
    whole = train({**settings, "run.name": "whole"})
    die_after(5, lambda: train(settings))
    resumed = headrace.train(tasks=demo.tasks(64), reward=letters, resume="runs/run")
    assert same_weights(resumed, whole)
    told = steps(whole)
    # The first attempts were drawn from the reference itself, as far as rounding goes.
    assert abs(told[0]["reward_kl"]) < 1e-5
    assert told[-1]["reward_kl"] > 1e-4
    # No term of the loss, so the trainer keeps no reference.
    assert {step["metrics"]["kl"] for step in told} == {0.0}
    assert not list(whole.model_dir.glob("reference*"))
    free = train({**settings, "algo.kl_coef": 0.0, "algo.options": {}, "run.name": "free"})
    assert not same_weights(free, whole)


class ProposesAndSolves(Echoing):
    """A proposal and two solutions of it, each paid for its letters."""

    async def run(self, task, policy):
        proposal = await policy.sample(self._renderer.prompt_ids(task), self._sampling)
        problem = proposal.completion.token_ids
        solutions = [await policy.sample(problem, self._sampling) for _ in range(2)]
        named = f"solver of {problem.tobytes().hex()}"
        return (self._paid(proposal, "proposer"), *[self._paid(s, named) for s in solutions])

    def _paid(self, turn, peers):
        text = self._renderer.decode(turn.completion.token_ids)
        return Trajectory(turns=(turn,), text=text, own_reward=letters([text])[0], peers=peers)


def nothing(completions):
    return [0.0] * len(completions)


def test_proposers_and_solvers_are_trained_apart_and_the_run_survives_a_kill(settings, die_after):
    given = {"tasks": demo.tasks(64), "reward": nothing, "environment": ProposesAndSolves}
    whole = headrace.train(settings={**settings, "run.name": "whole"}, **given)
    die_after(5, lambda: headrace.train(settings=settings, **given))
    assert same_weights(headrace.train(resume="runs/run", **given), whole)
    # Attempts as wholes earned nothing and all the same: what is learned is what trajectories earned.
    assert all(step["metrics"]["grad_norm"] > 0 and step["reward"] > 0 for step in steps(whole))


def test_a_run_on_optimal_baselines_survives_a_kill(settings, die_after):
    settings = {**settings, "algo.advantage": "vcpo", "trainer.minibatches": 2}
    whole = train({**settings, "run.name": "whole"})
    die_after(5, lambda: train(settings))
    assert same_weights(headrace.train(tasks=demo.tasks(64), reward=letters, resume="runs/run"), whole)
    assert all(step["metrics"]["baseline_shift"] > 0 for step in steps(whole))
    means = train({**settings, "algo.advantage": "dr-grpo", "run.name": "means"})
    assert not same_weights(means, whole)
