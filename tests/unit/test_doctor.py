from __future__ import annotations

import json

import torch

from headrace import demo, doctor
from headrace.config import from_dict
from headrace.errors import ModelError
from headrace.kernels import gated_library
from headrace.models import flash


def good(tmp_path, **changes):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in demo.tasks(8)))
    values = {
        "model.path": demo.prepare(tmp_path, warm_steps=0)["model.path"],
        "rollout.max_tokens": 8,
        "tasks.source": str(tasks),
        "reward.functions": ["headrace.demo:exact"],
    }
    return from_dict({**values, **changes})


def test_a_sound_run_passes_every_check(tmp_path):
    findings = doctor.examine(good(tmp_path))
    assert [f for f in findings if f.verdict == "fail"] == []
    named = {finding.check: finding.detail for finding in findings}
    assert "gold answers earn 1.000, empty ones 0.000" in named["reward exact"]
    assert "engine and trainer differ by" in named["log-probabilities"]
    assert named["weights"].startswith("travel by ")
    assert "tokens can be trained" in named["sequence length"]


def test_a_run_with_cut_distributions_is_compared_over_what_could_be_drawn(tmp_path):
    findings = doctor.examine(good(tmp_path, **{"rollout.top_p": 0.5, "rollout.top_k": 4}))
    assert [f for f in findings if f.verdict == "fail"] == []


def test_how_an_adapter_travels_is_explained(tmp_path):
    findings = doctor.examine(good(tmp_path, **{"lora.rank": 4, "model.device": "cpu"}))
    (weights,) = [finding for finding in findings if finding.check == "weights"]
    assert "travel by shared_memory: trainer and engines are on one machine" in weights.detail
    assert "adapter bundles: lora.rank is 4" in weights.detail


def test_a_small_shared_memory_is_explained(tmp_path, monkeypatch):
    """As in a container that was given 64 MiB of it."""
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("headrace.build.shutil.disk_usage", lambda path: usage)
    findings = doctor.examine(good(tmp_path, **{"model.device": "cpu"}))
    named = {finding.check: finding.detail for finding in findings}
    assert "travel by files: shared memory has 0.00 GB free" in named["weights"]
    assert "enlarge" in named["shared memory"]
    findings = doctor.examine(good(tmp_path, **{"model.device": "cpu", "weights.transport": "shared_memory"}))
    (weights,) = [finding for finding in findings if finding.check == "weights"]
    assert weights.verdict == "fail" and weights.detail.endswith("are free: set weights.transport to auto")


def test_a_transport_that_cannot_work_is_found(tmp_path):
    findings = doctor.examine(good(tmp_path, **{"weights.transport": "cuda_ipc", "model.device": "cpu"}))
    assert "weights.transport is cuda_ipc" in findings[-1].detail


def constant(completions):
    return [1.0] * len(completions)


def test_a_reward_that_cannot_tell_right_from_empty_is_found(tmp_path):
    findings = doctor.examine(good(tmp_path, **{"reward.functions": [f"{__file__}:constant"]}))
    (finding,) = [f for f in findings if f.verdict == "fail"]
    assert finding.check == "reward constant"
    assert "cannot tell them apart" in finding.detail


def test_a_missing_model_is_a_finding_not_a_traceback(tmp_path):
    findings = doctor.examine(good(tmp_path, **{"model.path": "./nowhere"}))
    assert findings[-1].verdict == "fail"
    assert "model.path" in findings[-1].detail


def test_kernels_that_cannot_be_used_do_not_stop_the_other_checks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(flash, "kernels_in_use", lambda device, size: f"its maker, for {size} on {device}")
    monkeypatch.setattr(gated_library, "kernels_in_use", lambda device: f"another, on {device}")
    told = {finding.check: finding.detail for finding in doctor.examine(None)}
    assert told["attention"] == "heads of size 128 are trained by the kernels of its maker, for 128 on cuda:0"
    assert told["gated layers"] == "those with many rows are computed by the kernels of another, on cuda:0"

    def broken(*_):
        raise ModelError("attention: it cannot be imported; install it anew")

    monkeypatch.setattr(flash, "kernels_in_use", broken)
    findings = doctor.examine(None)
    (finding,) = [finding for finding in findings if finding.check == "attention"]
    assert finding.verdict == "fail" and finding.detail.endswith("install it anew")
    assert [finding.check for finding in findings[-2:]] == ["gated layers", "shared memory"]
