"""Whole runs that train an adapter of the demo's tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from run_tools import SMALL, letters, train
from safetensors.torch import load_file

import headrace
from headrace import demo
from headrace.data.packing import pack
from headrace.errors import ConfigError
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.lora import LoraSpec
from headrace.observe.jsonl import read_events
from headrace.runtime.weight_sync import WeightSync
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.forward_check import plain_logprobs, probe_sample
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.trainers.torch_trainer import TorchTrainer

SETTINGS = {
    "run.steps": 5,
    **SMALL,
    "lora.rank": 4,
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {**demo.prepare(tmp_path, warm_steps=10), **demo.ADAPTER_SETTINGS, **SETTINGS}


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_only_adapters_travel_and_peft_loads_what_is_left(settings, monkeypatch, launcher):
    manifests = []
    land = WeightSync.land

    async def watched(self, manifest):
        manifests.append(manifest)
        await land(self, manifest)

    monkeypatch.setattr(WeightSync, "land", watched)
    result = train({**settings, "run.launcher": launcher, "rollout.max_lag": 2})
    attempts = result.summary.attempts
    assert attempts["trained"] == 5 * 2 * 4 == sum(attempts.values())
    saved = load_file(result.model_dir / "adapter_model.safetensors")
    own = sum(tensor.nbytes for tensor in saved.values())
    assert [m.version for m in manifests] == list(range(6))
    assert all(m.kind == "adapter" and own <= m.num_bytes <= 1.01 * own for m in manifests)
    assert any(tensor.any() for name, tensor in saved.items() if "lora_B" in name)

    ids = np.arange(9) % 8
    base = load_model(settings["model.path"])
    trainer = TorchTrainer(
        load_model(settings["model.path"]),
        sender=None,
        ledger=TimeLedger(TRAINER_ACTIVITIES),
        lora=LoraSpec(rank=4, alpha=8.0),
    )
    trainer.load(result.model_dir)
    with torch.no_grad():
        (row,) = pack([probe_sample(ids)], row_tokens=len(ids))
        expected, _ = token_logprobs(trainer.policy, row_tensors(row, device="cpu"))
        loaded = peft.PeftModel.from_pretrained(base, result.model_dir).eval()
        torch.testing.assert_close(plain_logprobs(loaded, ids), expected)
        torch.testing.assert_close(plain_logprobs(load_model(result.model_dir), ids), expected)


@pytest.mark.parametrize("transport", ["files", "collective"])
@pytest.mark.parametrize("targets", [["all-linear"], ["experts"]], ids=["layers", "experts"])
def test_every_transport_trains_as_shared_memory_does(settings, transport, targets):
    """Without lag a run in one process repeats bit for bit, so the way of the adapter must not show in it. Files name
    whole models' experts as checkpoints do, and adapters' as they are."""
    if targets == ["experts"]:
        base = Path(settings["model.path"])
        vocab_size = load_model(base).config.vocab_size
        make_tiny_model(base, family="qwen3_moe", vocab_size=vocab_size, hidden_size=32, init_std=0.1)
    few = {"lora.targets": targets, "model.dtype": "bfloat16", "rollout.max_lag": 0, "run.steps": 3}
    settings = {**settings, **few}
    plain = train({**settings, "run.name": "plain"})
    other = train({**settings, "weights.transport": transport})
    found, expected = (load_file(run.model_dir / "adapter_model.safetensors") for run in (other, plain))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("mode", ["drain", "abort", "block"])
def test_every_interrupt_mode(settings, mode):
    result = train({**settings, "run.steps": 3, "weights.mode": mode, "rollout.max_lag": 2})
    attempts = result.summary.attempts
    assert attempts["trained"] == 3 * 2 * 4 == sum(attempts.values())


def test_a_run_that_dies_ends_in_the_same_adapter_when_resumed(settings, die_after):
    settings = {**settings, "rollout.max_lag": 0}
    whole = train({**settings, "run.name": "whole"})
    die_after(4, lambda: train(settings))
    resumed = headrace.train(tasks=demo.tasks(64), reward=letters, resume="runs/run")
    expected = load_file(whole.model_dir / "adapter_model.safetensors")
    found = load_file(resumed.model_dir / "adapter_model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("changes", [{"lora.dora": True}, {"algo.kl_coef": 0.01}])
def test_dora_and_a_kl_term(settings, changes):
    result = train({**settings, **changes, "run.steps": 3})
    assert result.num_steps == 3


def test_a_mixture_trains_an_adapter_of_its_experts(settings, tmp_path):
    """Sampled by the engine as the trainer computes it, and evaluated merged."""
    base = Path(settings["model.path"])
    vocab_size = load_model(base).config.vocab_size
    make_tiny_model(base, family="qwen3_moe", vocab_size=vocab_size, hidden_size=32, init_std=0.1)
    result = train({**settings, "lora.targets": ["experts"], "rollout.max_lag": 0})
    assert result.num_steps == 5
    saved = load_file(result.model_dir / "adapter_model.safetensors")
    assert saved and all(".experts." in name and tensor.any() for name, tensor in saved.items())
    steps = [event for event in read_events(result.run_dir / "events.jsonl") if event["event"] == "step"]
    assert len(steps) == 5 and all(event["metrics"]["mismatch_max"] < 1e-5 for event in steps)
    headrace.evaluate(
        model=result.model_dir,
        tasks=demo.tasks(16),
        reward=demo.exact,
        settings={"rollout.max_tokens": 8, "model.device": "cpu"},
        num_tasks=4,
    )


def test_an_adapter_is_evaluated_merged(settings):
    result = train({**settings, "run.steps": 1})
    evaluation = headrace.evaluate(
        model=result.model_dir,
        tasks=demo.tasks(16),
        reward=demo.exact,
        settings={"rollout.max_tokens": 8, "model.device": "cpu"},
        num_tasks=4,
    )
    assert evaluation.num_tasks == 4


def test_settings_without_effect_are_refused(settings):
    with pytest.raises(ConfigError, match=r"lora\.rank is 0"):
        train({**settings, "lora.rank": 0, "lora.dora": True})


def test_the_demo_trains_an_adapter_when_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["lora.rank=2", "run.steps=2", "run.launcher=inline", "run.console=off"]
    result = demo.run(overrides=overrides)
    assert (result.model_dir / "adapter_config.json").is_file()
    assert load_model(result.model_dir)
