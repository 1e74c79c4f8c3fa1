"""Whole runs that branch off failed attempts, with the real engine and trainer on the demo's tiny model."""

from __future__ import annotations

import pytest
from run_tools import SMALL

import headrace
from headrace import demo
from headrace.observe.jsonl import read_events

SETTINGS = {
    "run.steps": 5,
    **SMALL,
    "pivots.branches": 3,
    "pivots.options": {"segment_tokens": 1},
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {**demo.prepare(tmp_path, warm_steps=10), **SETTINGS}


def train(settings):
    result = headrace.train(tasks=demo.tasks(64), reward=demo.exact, settings=settings)
    steps = [e for e in read_events(result.run_dir / "events.jsonl") if e["event"] == "step"]
    return result, steps


def test_synchronous_branches_are_forked_from_live_blocks(settings):
    result, steps = train({**settings, "rollout.max_lag": 0})
    attempts, counters = result.summary.attempts, steps[-1]["roles"][0]["counters"]
    num_branches = 3 * sum(step.get("pivot_groups", 0) for step in steps)
    assert num_branches > 0
    assert attempts["trained"] == 5 * 2 * 4 + num_branches
    # At lag 0 a group is scored, branched off and trained before the weights change.
    assert counters["forks"] == num_branches and counters["forks_stale"] == counters["forks_freed"] == 0
    assert counters["forked_tokens"] > 0


@pytest.mark.parametrize("mode", ["never", "abort"])
def test_asynchronous_branches_keep_the_bound_and_count_stale_forks(settings, mode):
    result, steps = train({**settings, "rollout.max_lag": 2, "weights.mode": mode, "run.steps": 8})
    counters = steps[-1]["roles"][0]["counters"]
    assert all(step["lag_max"] <= 2 for step in steps)
    assert any(step.get("pivot_groups") for step in steps)
    assert counters["forks"] + counters["forks_stale"] + counters["forks_freed"] > 0
    assert result.num_steps == 8


def test_an_interrupted_run_goes_on_with_its_branch_groups(settings):
    first, _ = train({**settings, "run.steps": 3})
    settings = {**settings, "run.steps": 6}
    again = headrace.train(tasks=demo.tasks(64), reward=demo.exact, settings=settings, resume=first.run_dir)
    assert again.num_steps == 6
    assert sum(again.summary.run_tokens.values()) >= sum(first.summary.tokens.values())


@pytest.mark.slow
def test_branches_across_processes(settings):
    """Holds, forks and releases go over the wire, and two engines share the work."""
    more = {"run.launcher": "local", "engine.count": 2, "rollout.max_lag": 1, "run.steps": 8}
    result, steps = train({**settings, **more})
    assert result.num_steps == 8
    assert sum(step.get("pivot_groups", 0) for step in steps) > 0
    engines = [role["counters"] for role in steps[-1]["roles"] if role["role"].startswith("engine")]
    assert sum(c["forks"] + c["forks_stale"] + c["forks_freed"] for c in engines) > 0
