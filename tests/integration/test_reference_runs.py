"""Whole runs whose reference is an engine of its own, against runs whose trainer keeps a copy."""

from __future__ import annotations

import json

import pytest
import torch
from run_tools import SMALL
from safetensors.torch import load_file

import headrace
from headrace import demo

SETTINGS = {
    "run.steps": 5,
    **SMALL,
    "rollout.max_lag": 0,
    "algo.kl_coef": 0.5,
    "algo.options": {"kl.reference": "engine"},
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepared = demo.prepare(tmp_path, warm_steps=0)
    return {**prepared, **SETTINGS}


def letters_a(completions: list[str], **_: object) -> list[float]:
    """A reward that differs between attempts from the first step on: without a gradient of its own, the optimizer
    would enlarge rounding to whole steps."""
    return [text.count("a") / 8 for text in completions]


def train(settings, **more):
    return headrace.train(tasks=demo.tasks(64), reward=letters_a, settings=settings, **more)


def metrics(result) -> list[dict[str, float]]:
    lines = (result.run_dir / "events.jsonl").read_text().splitlines()
    return [event["metrics"] for event in map(json.loads, lines) if event["event"] == "step"]


def test_the_curve_is_that_of_a_reference_in_the_trainer(settings):
    engine = train({**settings, "run.name": "engine"})
    copy = train({**settings, "run.name": "copy", "algo.options": {}})
    assert (copy.model_dir / "reference.safetensors").exists()
    assert not list(engine.model_dir.glob("reference*"))
    pairs = list(zip(metrics(engine), metrics(copy), strict=True))
    assert len(pairs) == 5
    assert pairs[-1][0]["kl"] > 1e-5
    for got, expected in pairs:
        for name in ("loss", "kl", "grad_norm"):
            assert got[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name


def test_a_run_that_dies_is_resumed_with_the_same_reference(settings, die_after):
    whole = train({**settings, "run.name": "whole"})
    die_after(4, lambda: train(settings))
    resumed = headrace.train(tasks=demo.tasks(64), reward=letters_a, resume="runs/run")
    expected = load_file(whole.model_dir / "model.safetensors")
    for name, tensor in load_file(resumed.model_dir / "model.safetensors").items():
        assert torch.equal(tensor, expected[name]), name


def test_the_reference_is_a_process_beside_the_others(settings):
    result = train({**settings, "run.launcher": "local", "run.steps": 2, "rollout.max_lag": 1})
    assert result.summary.attempts["trained"] == 2 * 2 * 4
    assert (result.run_dir / "logs" / "reference.log").exists()
    events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    (end,) = [event for event in events if event["event"] == "run.end"]
    (role,) = [role for role in end["roles"] if role["role"] == "reference"]
    assert role["version"] == 0
    assert role["seconds"]["prefill"] > 0
