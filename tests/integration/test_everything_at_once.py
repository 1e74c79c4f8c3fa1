"""One run with nearly everything switched on, killed and resumed: what works alone must work side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headrace
from headrace import demo
from headrace.cli import app
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.models.loading import make_tiny_model
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import Sample, StepResult, TrainBatch

JUDGE = """
def vowels(steps):
    return [sum(c in "ae" for c in step) / max(1, len(step)) - 0.5 for step in steps]
"""

EVERYTHING: dict[str, Any] = {
    "run.steps": 4,
    "run.launcher": "inline",
    "run.console": "off",
    "run.checkpoint_every": 2,
    "run.keep_checkpoints": 10,
    "run.name": "run",
    "model.device": "cpu",
    "rollout.group_size": 4,
    "rollout.groups_per_step": 2,
    "rollout.max_tokens": 8,
    "rollout.max_lag": 1,
    "rollout.top_p": 0.9,
    "rollout.temperature": 0.9,
    "scoring.steps": "tokens:2",
    "pivots.branches": 3,
    "pivots.options": {"segment_tokens": 1},
    "distill.divergence": "sampled",
    "algo.corrections": ["tis"],
    "algo.kl_coef": 0.1,
    "algo.options": {"kl.reference": "engine"},
    "trainer.minibatches": 2,
    "trainer.learning_rate": 1e-3,
}


def letters_a(completions: list[str], **_: object) -> list[float]:
    """Seldom 1, so that there is something to branch off."""
    return [text.count("a") / 8 for text in completions]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A mixture of experts as the policy, a dense teacher, and a judge that is a function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "judge_of_vowels.py").write_text(JUDGE)
    for name, family, std in (("policy", "qwen3_moe", 0.1), ("teacher", "llama", 0.3)):
        size = make_char_tokenizer(tmp_path / name, demo.LETTERS + ">")
        make_tiny_model(
            tmp_path / name,
            family=family,
            vocab_size=size,
            hidden_size=32,
            init_std=std,
            context_tokens=64,
        )
    return {
        **EVERYTHING,
        "model.path": str(tmp_path / "policy"),
        "distill.teachers": {"dense": str(tmp_path / "teacher")},
        "scoring.process": "judge_of_vowels:vowels",
    }


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    """Grows by every sample that is trained on."""
    samples: list[Sample] = []
    whole_step = TorchTrainer.step

    def step(self: TorchTrainer, batch: TrainBatch) -> StepResult:
        samples.extend(batch.samples)
        return whole_step(self, batch)

    monkeypatch.setattr(TorchTrainer, "step", step)
    return samples


def train(settings: dict[str, Any], **more: Any) -> Any:
    return headrace.train(tasks=demo.tasks(64), reward=letters_a, settings=settings, **more)


def step_metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return {event["step"]: event["metrics"] for event in events if event["event"] == "step"}


def test_everything_at_once_is_killed_resumed_and_found_sound(settings, trained, die_after):
    die_after(3, lambda: train(settings))
    result = train(settings, resume="runs/run")
    assert result.num_steps == 4

    assert {sample.component for sample in trained} == {"main", "pivot"}
    for sample in trained:
        assert sample.sampling_mask is not None and len(sample.sampling_mask.offsets) == sample.num_tokens + 1
        assert sample.routing is not None and sample.routing.recorded[:-1].all()
        assert sample.teacher is not None and len(sample.teacher.logprobs) == sample.num_tokens
        assert sample.ref_logprobs is not None and len(sample.ref_logprobs) == sample.num_tokens
    judged = [s for s in trained if len(set(s.advantages[s.loss_mask].tolist())) > 1]
    assert judged

    metrics = step_metrics(result.run_dir)
    # The step after which the run died was trained again on the way back, and told to nobody.
    assert set(metrics) == {1, 2, 4}
    for figures in metrics.values():
        assert {"kept_mass", "route_flips", "teacher_divergence", "masked_by_tis"} <= figures.keys()
        assert figures["routing_fallback"] == 0.0
    # Engine and trainer value what could be drawn, with the experts that drew it. Later tokens may have looked at keys
    # and values of weights before their own.
    assert metrics[1]["mismatch_max"] < 1e-4

    checked = CliRunner().invoke(
        app, ["replay", str(result.run_dir), "--check", "--recompute"], catch_exceptions=False
    )
    assert checked.exit_code == 0, checked.output
    assert "every record is sound" in checked.output
    shown = CliRunner().invoke(app, ["replay", str(result.run_dir)], catch_exceptions=False)
    assert shown.exit_code == 0 and "@" in shown.output
