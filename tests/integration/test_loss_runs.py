"""Parts of the loss library that reach beyond the loss, in whole runs in one process on the demo's tiny model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import headrace
from headrace import demo

SMALL = {
    "run.steps": 6,
    "run.launcher": "inline",
    "run.console": "off",
    "run.checkpoint_every": 2,
    "run.name": "run",
    "rollout.group_size": 4,
    "rollout.groups_per_step": 2,
    "rollout.max_lag": 0,
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {**demo.prepare(tmp_path, warm_steps=10), **SMALL}


def letters(completions):
    """Never the same for all attempts, so that every step moves the weights."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def train(settings, **more):
    return headrace.train(tasks=demo.tasks(64), reward=letters, settings=settings, **more)


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
