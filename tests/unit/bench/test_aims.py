"""Aims beside figures from files: only figures that are about an aim count, the latest of them, and of which source."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from headrace.bench import aims, provenance
from headrace.bench.commands import bench
from headrace.errors import ConfigError


def facts(name, *, date="2026-11-16 10:00 UTC", source="aaaa"):
    return {"taken": {"bench": name, "date": date, "device": "a GPU", "source": source}}


def engine(seconds, *, shape="qwen2-7b", rounds=1, **told):
    ours = {"shape": shape, "rounds": rounds, "turns": 1, "seconds": seconds}
    return {**facts("engine", **told), "headrace": ours, "vllm": {"seconds": 18.0}, "ratio": 18.0 / seconds}


def step(*, max_lag=0, checkpointed_s=24.0):
    tried = [
        {"checkpointing": True, "seconds": checkpointed_s, "peak_bytes": 60e9},
        {"checkpointing": False, "seconds": 20.0, "peak_bytes": 120e9},
    ]
    ours = {"seconds": 8.0, "peak_bytes": 54e9}
    trl = {**tried[1], "tried": tried}
    return {**facts("step"), "shape": "qwen2-1.5b", "max_lag": max_lag, "headrace": ours, "trl": trl}


def seen(*found):
    return {line["aim"]: line for line in aims.run(list(found))["aims"] if line["seen"] is not None}


def test_the_last_figures_about_an_aim_count():
    lines = seen(
        engine(16.0), engine(14.0, date="2026-11-16 12:00 UTC"), engine(12.0, date="2026-11-16 11:00 UTC")
    )
    assert lines.keys() == {"rollouts against vLLM, qwen2-7b"}
    line = lines["rollouts against vLLM, qwen2-7b"]
    assert line["seen"] == pytest.approx(18.0 / 14.0) and line["is_met"] and line["wanted"] == "at least 1.2x"


def test_other_workloads_shapes_and_commands_are_not_about_it():
    failed = engine(14.0)
    failed["vllm"] = {"failed": "out of memory"}
    on_cpu = {**facts("engine"), "cases": []}
    other = engine(14.0)
    other["taken"]["bench"] = "head"
    assert not seen(engine(14.0, rounds=3), engine(14.0, shape="qwen2-3b"), failed, on_cpu, other)


def test_the_step_is_held_against_trl_with_checkpointing_and_its_memory():
    lines = seen(step())
    assert lines["whole step against TRL with checkpointing"]["seen"] == 3.0
    assert lines["its peak memory, of TRL's"]["seen"] == pytest.approx(0.9)
    assert all(line["is_met"] for line in lines.values())
    assert not seen(step(checkpointed_s=23.9))["whole step against TRL with checkpointing"]["is_met"]
    assert not seen(step(max_lag=1))


def test_every_aim_can_be_seen():
    sync = {"cells": [{"bundle": "full", "transport": "cuda_ipc", "stall_ms": 4.0}]}
    train = {"cases": [{"mfu": 0.5}, {"mfu": 0.6}]}
    gaps = {"mismatch": {"mean": 0.01}, "vllm_trl_bfloat16": {"mean": 0.025}}
    starts = {"shape": "qwen2-1.5b", "cold": {"seconds": 61.0}, "warm": {"seconds": 19.0}}
    lines = seen(
        *(engine(10.0, shape=shape) for shape in ("qwen2-0.5b", "qwen2-1.5b", "qwen2-7b")),
        step(),
        *({**facts("train"), "shape": shape, **train} for shape in ("qwen2-1.5b", "qwen2-7b")),
        *({**facts("sync"), "shape": shape, **sync} for shape in ("qwen2-1.5b", "qwen2-7b")),
        {**facts("mismatch"), "shape": "qwen2-1.5b", "gaps": gaps},
        {**facts("start"), **starts},
        {**facts("soak"), "minutes": 8.1},
    )
    assert len(lines) == len(aims.AIMS)
    missed = [name for name, line in lines.items() if not line["is_met"]]
    assert missed == ["rollouts against vLLM, qwen2-0.5b", "start, cold"]
    assert lines["model-FLOPs use, qwen2-7b"]["seen"] == 60.0
    assert lines["mismatch, of TRL with vLLM's"]["seen"] == pytest.approx(0.4)


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
    (tmp_path / "two.json").write_text(json.dumps(step() | facts("step", source="bbbb")))
    assert "of different versions" in shown(tmp_path / "one.json", tmp_path / "two.json")


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_files_that_are_no_figures_are_named(tmp_path, text):
    file = tmp_path / "figures.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"figures\.json"):
        aims.read([file])


def test_no_files_and_missing_ones_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="no file with figures"):
        aims.read([tmp_path])
    with pytest.raises(ConfigError, match=r"none\.json"):
        aims.read([tmp_path / "none.json"])


def test_figures_say_how_they_were_taken(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/headrace", "bench", "head", "--tokens", "8"])
    found = provenance.taken("head")
    assert found["bench"] == "head" and found["command"] == "headrace bench head --tokens 8"
    assert found["device"] and found["versions"]["torch"] and len(found["source"]) == 12
    assert "headrace bench head --tokens 8; 20" in provenance.quoted(found)


def test_a_source_is_known_by_names_and_contents(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "within").mkdir()
    first = provenance.fingerprint(tmp_path, "**/*.py")
    (tmp_path / "b.txt").write_text("not source")
    assert provenance.fingerprint(tmp_path, "**/*.py") == first
    (tmp_path / "a.py").rename(tmp_path / "within" / "a.py")
    second = provenance.fingerprint(tmp_path, "**/*.py")
    (tmp_path / "within" / "a.py").write_text("x = 2")
    assert len({first, second, provenance.fingerprint(tmp_path, "**/*.py")}) == 3


def test_a_package_that_no_checkout_holds_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)
    assert provenance.commit() is None
