"""Aims beside figures from files: only figures that are about an aim count, the latest of them, and of which source."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from headrace.bench import aims
from headrace.bench.commands import bench
from headrace.errors import ConfigError


def facts(name, *, date="2026-11-16 10:00 UTC", source="aaaa"):
    return {"taken": {"bench": name, "date": date, "device": "a GPU", "source": source}}


def engine(seconds, *, shape="qwen2-7b", rounds=1, turns=1, **told):
    ours = {"shape": shape, "rounds": rounds, "turns": turns, "seconds": seconds}
    return {**facts("engine", **told), "headrace": ours, "vllm": {"seconds": 18.0}, "ratio": 18.0 / seconds}


def step(*, shape="qwen2-1.5b", max_lag=0, checkpointed_s=24.0, peak_bytes=54e9, tried=None):
    both = [
        {"checkpointing": False, "seconds": 20.0, "peak_bytes": 120e9},
        {"checkpointing": True, "seconds": checkpointed_s, "peak_bytes": 60e9},
    ]
    ours = {"max_lag": max_lag, "seconds": 8.0, "peak_bytes": peak_bytes}
    # A lag that no aim is about, and that would meet them all.
    other = {"max_lag": 2, "seconds": 1.0, "peak_bytes": 1e9}
    trl = {**both[0], "tried": both if tried is None else tried}
    return {**facts("step"), "shape": shape, "headrace": [other, ours], "trl": trl}


def seen(*found):
    return {line["aim"]: line for line in aims.run(list(found))["aims"] if line["seen"] is not None}


def test_the_last_figures_about_an_aim_count():
    lines = seen(
        engine(16.0), engine(14.0, date="2026-11-16 12:00 UTC"), engine(12.0, date="2026-11-16 11:00 UTC")
    )
    assert lines.keys() == {"rollouts against vLLM, qwen2-7b"}
    line = lines["rollouts against vLLM, qwen2-7b"]
    assert line["seen"] == pytest.approx(18.0 / 14.0) and line["is_met"] and line["wanted"] == "at least 1.2x"


def sync(stall_ms, *, shape="qwen2-1.5b", transport="cuda_ipc"):
    cell = {"bundle": "full", "transport": transport, "stall_ms": stall_ms}
    other = {"bundle": "delta", "transport": "cuda_ipc", "stall_ms": 1.0}
    return {**facts("sync"), "shape": shape, "cells": [other, cell]}


def train(shared, *, shape="qwen2-1.5b", repeated=0.99):
    cases = [{"share_prefixes": False, "mfu": repeated}, {"share_prefixes": True, "mfu": shared}]
    return {**facts("train"), "shape": shape, "cases": cases}


def mismatch(ours, *, shape="qwen2-1.5b", **peers):
    gaps = {"mismatch": {"mean": ours}} | {f"vllm_trl_{name}": {"mean": mean} for name, mean in peers.items()}
    return {**facts("mismatch"), "shape": shape, "gaps": gaps}


def started(cold, warm, *, shape="qwen2-1.5b"):
    return {**facts("start"), "shape": shape, "cold": {"seconds": cold}, "warm": {"seconds": warm}}


# For each aim: figures that just meet it, and figures that just miss it.
BOUNDS = {
    "rollouts against vLLM, qwen2-0.5b": (engine(6.0, shape="qwen2-0.5b"), engine(6.1, shape="qwen2-0.5b")),
    "rollouts against vLLM, qwen2-1.5b": (engine(10.0, shape="qwen2-1.5b"), engine(10.1, shape="qwen2-1.5b")),
    "rollouts against vLLM, qwen2-7b": (engine(15.0), engine(15.1)),
    "the quicker step against TRL with checkpointing": (step(), step(checkpointed_s=23.9)),
    "peak memory of TRL over that of this step": (step(peak_bytes=60e9), step(peak_bytes=61e9)),
    "model-FLOPs use, qwen2-1.5b": (train(0.55), train(0.549)),
    "model-FLOPs use, qwen2-7b": (train(0.45, shape="qwen2-7b"), train(0.449, shape="qwen2-7b")),
    "stall for new weights, qwen2-1.5b": (sync(5.0), sync(5.1)),
    "stall for new weights, qwen2-7b": (sync(15.0, shape="qwen2-7b"), sync(15.1, shape="qwen2-7b")),
    "mismatch, of TRL's with bfloat16 weights and vLLM": (
        mismatch(0.01, bfloat16=0.02, float32=0.01),
        mismatch(0.0101, bfloat16=0.02, float32=0.03),
    ),
    "mismatch, of TRL's with float32 weights and vLLM": (
        mismatch(0.01, bfloat16=0.01, float32=0.02),
        mismatch(0.0101, bfloat16=0.03, float32=0.02),
    ),
    "start, cold": (started(60.0, 99.0), started(60.1, 1.0)),
    "start, warm": (started(99.0, 20.0), started(1.0, 20.1)),
    "a long run that leaks nothing": ({**facts("soak"), "minutes": 8.0}, {**facts("soak"), "minutes": 7.9}),
}


@pytest.mark.parametrize("name", [aim.name for aim in aims.AIMS])
def test_an_aim_is_met_up_to_its_bound(name):
    meets, misses = BOUNDS[name]
    assert seen(meets)[name]["is_met"] is True
    assert seen(misses)[name]["is_met"] is False


@pytest.mark.parametrize(
    "figures",
    [
        engine(14.0, rounds=3),
        engine(14.0, turns=8),
        engine(14.0, shape="qwen2-3b"),
        engine(14.0) | {"vllm": {"failed": "out of memory"}},
        {**facts("engine"), "cases": []},
        engine(14.0) | facts("head"),
        step(max_lag=3),
        step(shape="qwen2-0.5b"),
        step(tried=[{"checkpointing": True, "failed": "out of memory"}]),
        step(tried=[{"checkpointing": False, "seconds": 20.0, "peak_bytes": 1e9}]),
        {name: value for name, value in step().items() if name != "trl"},
        sync(1.0, transport="files"),
        sync(1.0, shape="qwen2-0.5b"),
        train(0.9, shape="qwen2-0.5b"),
        mismatch(0.01),
        mismatch(0.01, shape="qwen2-0.5b", bfloat16=0.1, float32=0.1),
        started(1.0, 1.0, shape="qwen2-0.5b"),
    ],
)
def test_other_workloads_shapes_and_commands_are_about_no_aim(figures):
    assert not seen(figures)


def test_of_both_ways_to_share_a_gpu_the_quicker_counts_and_its_memory():
    figures = step()
    figures["headrace"].append({"max_lag": 1, "seconds": 7.5, "peak_bytes": 61e9})
    lines = seen(figures)
    assert lines["the quicker step against TRL with checkpointing"]["seen"] == pytest.approx(24.0 / 7.5)
    assert lines["peak memory of TRL over that of this step"]["is_met"] is False


def test_steps_in_an_older_form_are_left_out_and_said(tmp_path):
    old = step() | {"headrace": {"seconds": 8.0}, "max_lag": 0}
    (tmp_path / "old.json").write_text(json.dumps(old))
    (tmp_path / "one.json").write_text(json.dumps(engine(14.0)))
    said = []
    assert len(aims.read([tmp_path], progress=said.append)) == 1
    assert len(said) == 1 and "older form" in said[0]


def shown(*given):
    done = CliRunner().invoke(
        bench, ["aims", *map(str, given)], env={"COLUMNS": "160"}, catch_exceptions=False
    )
    assert done.exit_code == 0
    return done.stdout


def test_the_table_says_when_figures_are_of_different_versions(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(engine(14.0)))
    text = shown(tmp_path)
    assert "of one version" in text and "1.29x  met" in text and "not measured" in text
    (tmp_path / "one.json").write_text(json.dumps(engine(16.0)))
    assert "1.12x  missed" in shown(tmp_path)
    (tmp_path / "two.json").write_text(json.dumps(step() | facts("step", source="bbbb")))
    assert "of different versions" in shown(tmp_path / "one.json", tmp_path / "two.json")


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", b"\xff"])
def test_files_that_are_no_figures_are_named(tmp_path, text):
    file = tmp_path / "figures.json"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=r"figures\.json"):
        aims.read([file])


def test_what_else_lies_in_a_folder_is_left_out_and_said(tmp_path):
    (tmp_path / "aims.json").write_text('{"aims": []}')
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "one.json").write_text(json.dumps(engine(14.0)))
    said = []
    assert len(aims.read([tmp_path], progress=said.append)) == 1
    assert len(said) == 1 and "aims.json" in said[0]


def test_no_files_and_missing_ones_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="no file with figures"):
        aims.read([tmp_path])
    with pytest.raises(ConfigError, match=r"none\.json"):
        aims.read([tmp_path / "none.json"])


def test_nothing_about_an_aim_is_not_one_version(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(engine(14.0, rounds=2)))
    assert "nothing that is held to an aim" in shown(tmp_path)
