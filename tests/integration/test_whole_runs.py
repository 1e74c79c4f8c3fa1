"""Whole runs with the real engine and trainer, in one process, on the demo's tiny model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from run_tools import SMALL, letters, train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import headrace
from headrace import demo
from headrace.errors import ConfigError
from headrace.types import Trajectory

SETTINGS = {
    "run.steps": 6,
    **SMALL,
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {**demo.prepare(tmp_path, warm_steps=10), **SETTINGS}


@pytest.mark.parametrize("mode", ["never", "drain", "abort", "block"])
def test_every_interrupt_mode_trains_every_attempt_within_the_lag(settings, mode):
    result = train({**settings, "weights.mode": mode, "rollout.max_lag": 2})
    attempts = result.summary.attempts
    assert attempts["trained"] == 6 * 2 * 4 == sum(attempts.values())
    assert sum(result.summary.tokens.values()) == result.summary.tokens["trained"]


def test_late_attempts_and_fewer_groups_under_way_lose_nothing(settings):
    late = {"rollout.max_lag": 2, "rollout.over_provision": 1.5, "rollout.quorum": 0.75}
    result = train({**settings, **late})
    attempts = result.summary.attempts
    assert attempts["trained"] + attempts.get("dropped:cancelled", 0) == sum(attempts.values()) == 6 * 2 * 4
    assert attempts["trained"] >= 6 * 2 * 3


@pytest.mark.parametrize(
    ("transport", "bundle"),
    [("files", "full"), ("files", "delta"), ("collective", "full"), ("collective", "delta")],
)
def test_every_transport_trains_as_shared_memory_does(settings, transport, bundle):
    """Without lag a run in one process repeats bit for bit, so the way of the weights must not show in them."""
    settings = {**settings, "rollout.max_lag": 0}
    plain = train({**settings, "run.name": "plain"})
    other = train({**settings, "weights.transport": transport, "weights.bundle": bundle})
    places = (other.model_dir, plain.model_dir, Path(settings["model.path"]))
    saved, expected, start = (load_file(place / "model.safetensors") for place in places)
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    assert not any(torch.equal(saved[name], start[name]) for name in expected)


def test_checkpoints_load_with_from_pretrained(settings):
    result = train(settings)
    model = AutoModelForCausalLM.from_pretrained(result.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(result.model_dir)
    saved = load_file(result.model_dir / "model.safetensors")
    for name, tensor in saved.items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert tokenizer.decode(tokenizer("abc>")["input_ids"]) == "abc>"


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_run_that_dies_is_resumed_and_at_lag_0_ends_in_the_same_weights(settings, die_after, max_lag):
    settings = {**settings, "rollout.max_lag": max_lag}
    whole = train({**settings, "run.name": "whole"})
    die_after(5, lambda: train(settings))
    resumed = headrace.train(tasks=demo.tasks(64), reward=letters, resume="runs/run")
    assert resumed.num_steps == 6
    assert resumed.summary.run_attempts["trained"] == 6 * 2 * 4 == sum(resumed.summary.run_attempts.values())
    if max_lag == 0:
        expected = load_file(whole.model_dir / "model.safetensors")
        for name, tensor in load_file(resumed.model_dir / "model.safetensors").items():
            assert torch.equal(tensor, expected[name]), name


def test_a_resumed_run_has_its_own_settings_but_for_those_given(settings):
    train({**settings, "run.steps": 2})
    longer = train({"run": {"steps": 4}}, resume="runs/run")
    assert longer.num_steps == 4
    assert train({"run.steps": 6}, resume="runs/run").num_steps == 6
    with pytest.raises(ConfigError, match=r"rollout\.group_size"):
        train({"rollout.group_size": 8}, resume="runs/run")
    with pytest.raises(ConfigError, match=r"^resume: the run in runs/run was given its tasks from Python"):
        headrace.train(resume="runs/run", settings={"run.steps": 8})


def test_runs_and_evaluations_from_within_a_loop(settings):
    """As in a notebook."""

    async def cells():
        result = train(settings)
        given = {"model": result.model_dir, "tasks": demo.tasks(8), "reward": letters}
        return result, headrace.evaluate(**given, settings={"rollout.max_tokens": 8}, num_tasks=4)

    result, evaluation = asyncio.run(cells())
    assert result.num_steps == 6
    assert evaluation.num_tasks == 4


def test_steps_that_only_the_journal_holds_are_taken_too(settings, die_after):
    """Of a run that died at step 5 the newest checkpoint is of step 4: fewer than 5 steps are refused."""
    die_after(5, lambda: train(settings))
    with pytest.raises(ConfigError, match=r"run\.steps is 4, but the run in runs/run is at step 5 already"):
        train({**settings, "run.steps": 4}, resume="runs/run")
    resumed = train(settings, resume="runs/run")
    assert resumed.summary.headline().startswith("2 steps (5 to 6) in")
    assert len(resumed.rewards) == 1


def test_evaluation_repeats_exactly(settings):
    result = train(settings)
    arguments = {
        "model": result.model_dir,
        "tasks": demo.tasks(16),
        "reward": demo.exact,
        "settings": {"rollout.max_tokens": 8, "rollout.temperature": 0.0},
        "num_tasks": 8,
    }
    first, second = headrace.evaluate(**arguments), headrace.evaluate(**arguments)
    assert first == second
    assert first.num_tasks == 8
    assert 0.0 <= first.mean_return <= 1.0


def test_evaluation_in_an_environment_of_ones_own(settings):
    class Twice:
        """Asks again whatever the answer was."""

        def __init__(self, renderer, sampling):
            self._renderer, self._sampling = renderer, sampling

        async def run(self, task, policy):
            shown = self._renderer.prompt_ids(task)
            turns = [await policy.sample(shown, self._sampling) for _ in range(2)]
            return (Trajectory(turns=tuple(turns), text=""),)

    arguments = {
        "model": train(settings).model_dir,
        "tasks": demo.tasks(4),
        "reward": lambda completions: [float(not text) for text in completions],
        "settings": {"rollout.max_tokens": 3, "rollout.stop": []},
        "num_tasks": 4,
    }
    twice, once = headrace.evaluate(**arguments, environment=Twice), headrace.evaluate(**arguments)
    assert (twice.mean_return, once.mean_return) == (1.0, 0.0) and once.mean_tokens < twice.mean_tokens <= 6
    with pytest.raises(ConfigError, match="environment is a Twice"):
        headrace.evaluate(**arguments, environment=Twice(None, None))


def test_warm_start_lowers_the_loss_and_writes_a_model_with_its_tokenizer(settings, tmp_path):
    losses = headrace.warm_start(
        model=settings["model.path"],
        examples=demo.tasks(256),
        output=tmp_path / "started",
        steps=12,
        learning_rate=3e-3,
    )
    assert len(losses) == 12
    assert np.mean(losses[-3:]) < 0.8 * losses[0]
    assert AutoTokenizer.from_pretrained(tmp_path / "started").eos_token == "<eos>"
