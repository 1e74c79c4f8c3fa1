"""A peer that is not there is missed before anything is measured."""

from __future__ import annotations

import importlib.util
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
