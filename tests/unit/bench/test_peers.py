"""A peer that is not there is missed before anything is measured."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from headrace.bench import peers, rollouts, step
from headrace.errors import ConfigError


def measured(*_: object, **__: object) -> NoReturn:
    raise AssertionError("it was measured all the same")


def test_our_side_is_not_measured_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(rollouts, "run", measured)
    monkeypatch.setattr(step, "write_checkpoint", measured)
    with pytest.raises(ConfigError, match="--against vllm: vllm is not installed; install the extra vllm"):
        rollouts.compare("qwen2-0.5b", against="vllm")
    with pytest.raises(
        ConfigError, match="--against trl: trl is not installed; install the extras bench and vllm"
    ):
        step.run(against="trl")


def test_what_was_measured_stays_when_the_peer_fails(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from headrace.bench import step_with_trl

    def failing(*_: object, **__: object) -> NoReturn:
        raise ConfigError("out of memory")

    monkeypatch.setattr(step_with_trl, "run", failing)
    lines: list[str] = []
    found = step._with_trl(tmp_path, step.StepWorkload(), 3, lines.append)
    assert [one["failed"] for one in found["tried"]] == ["out of memory"] * 2
    ours = {"seconds": 9.0, "peak_bytes": 5e10}
    limit = {"limit_s": 4.5, "limit_generation_s": 1.1, "limit_training_s": 3.4}
    table = step.table({"shape": "qwen2-1.5b", "max_lag": 0, **limit, "headrace": ours, "trl": found})
    assert table.row_count == 1 and any("failed" in line for line in lines)


def test_the_sampler_of_a_missing_library_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert peers.environment()["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in peers.environment()


@pytest.fixture
def other_python(tmp_path: Path) -> Path:
    """An interpreter that finds this Headrace, and of the peers TRL alone, which fails when it is run."""
    packages = tmp_path / "packages"
    (packages / "trl").mkdir(parents=True)
    (packages / "trl" / "__init__.py").write_text("")
    (packages / "trl" / "__main__.py").write_text("import sys; sys.exit('no GPU ' + ' '.join(sys.argv[1:]))")
    python, source = tmp_path / "python", Path(peers.__file__).parents[2]
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages}:{source} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_another_interpreter_is_asked_what_it_has(other_python: Path) -> None:
    assert peers.lacking(["trl", "no_such_library", "json"], other_python) == ["no_such_library"]
    peers.need("trl", ["trl"], "the extra bench", other_python)
    with pytest.raises(
        ConfigError, match=r"no_such_library is not installed where .*python looks; install it"
    ):
        peers.need("trl", ["trl", "no_such_library"], "it", other_python)
    assert peers.environment(other_python)["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def test_a_peer_runs_in_the_interpreter_it_is_given(other_python: Path) -> None:
    with pytest.raises(ConfigError, match="--against trl: the run failed:\nno GPU a b"):
        peers.run("trl", "trl", ["a", "b"], python=other_python, deadline_s=60)
    peers.run("trl", "json.tool", ["--help"], python=None, deadline_s=60)


def test_what_is_no_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--peer-python .*nothing: it is no Python that runs"):
        peers.need("vllm", ["vllm"], "it", tmp_path / "nothing")
    with pytest.raises(ConfigError, match="it is no Python that runs"):
        peers.need("vllm", ["vllm"], "it", Path("/bin/false"))
