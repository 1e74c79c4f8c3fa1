"""Keep Routing in whole runs and over several ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_tools import make_batch, make_model, ranked, single, within
from run_tools import SMALL

import headrace
from headrace import demo
from headrace.config import load
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.data.routing import check_routing
from headrace.models.loading import make_tiny_model
from headrace.replay.recompute import recompute
from headrace.runtime.recording import read_recording
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import Routing, Sample, StepResult, TrainBatch

METRICS = ("loss", "grad_norm", "kl", "entropy", "route_flips", "route_flips_worst", "routing_fallback")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    made = {
        **demo.prepare(tmp_path, warm_steps=0),
        "run.steps": 4,
        **SMALL,
    }
    vocab_size = make_char_tokenizer(tmp_path / "blank", demo.LETTERS + ">")
    make_tiny_model(tmp_path / "blank", family="qwen3_moe", vocab_size=vocab_size, context_tokens=64)
    headrace.warm_start(
        model=tmp_path / "blank", examples=demo.tasks(4096), output=made["model.path"], steps=5, device="cpu"
    )
    return made


def train(settings: dict[str, Any]) -> Any:
    return headrace.train(tasks=demo.tasks(64), reward=demo.exact, settings=settings)


def steps_of(run: Path) -> list[dict[str, float]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event["metrics"] for event in map(json.loads, lines) if event.get("event") == "step"]


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


def assert_recorded(samples: list[Sample]) -> None:
    assert samples
    for sample in samples:
        assert sample.routing is not None
        check_routing(sample.routing, num_tokens=sample.num_tokens, num_layers=2, num_experts=4, top_k=2)
        assert sample.routing.recorded[:-1].all()


@pytest.mark.parametrize("mode", ["never", "abort"])
def test_every_token_is_trained_with_the_experts_that_sampled_it(
    settings: dict[str, Any], trained: list[Sample], mode: str
) -> None:
    train({**settings, "weights.mode": mode, "rollout.max_lag": 2, "model.dtype": "bfloat16"})
    assert len(trained) == 4 * 2 * 4
    assert_recorded(trained)
    metrics = steps_of(Path("runs/run"))[-1]
    assert {"route_flips", "route_flips_worst"} <= metrics.keys()
    assert metrics["routing_fallback"] == 0.0


def test_recorded_logprobs_are_computed_again_as_a_training_step_does(settings: dict[str, Any]) -> None:
    """In bfloat16 routers near a tie choose differently, so only the recorded experts give the recorded values."""
    make_tiny_model(
        Path("model"), family="qwen3_moe", vocab_size=11, context_tokens=64, init_std=0.3, num_experts=32,
        experts_per_token=8,
    )  # fmt: skip
    more = {"model.dtype": "bfloat16", "rollout.max_lag": 0, "run.keep_checkpoints": 10, "run.steps": 2}
    result = train({**settings, **more, "rollout.group_size": 16})
    chosen = load(result.run_dir / "settings.toml", training=False)
    drawn_first = recompute(read_recording(result.run_dir), result.run_dir, chosen)[0]
    assert drawn_first.version == 0
    trained = steps_of(result.run_dir)[0]
    assert trained["route_flips"] > 0
    assert drawn_first.largest == pytest.approx(trained["mismatch_max"], abs=1e-6)


def test_a_resumed_run_reads_routes_from_its_journal(
    settings: dict[str, Any],
    trained: list[Sample],
    die_after: Callable[[int, Callable[[], object]], None],
) -> None:
    die_after(3, lambda: train(settings))
    resumed = headrace.train(tasks=demo.tasks(64), reward=demo.exact, resume="runs/run")
    assert resumed.num_steps == 4
    assert len(trained) > 4 * 2 * 4
    assert_recorded(trained)


def test_live_routing_records_nothing(settings: dict[str, Any], trained: list[Sample]) -> None:
    train({**settings, "algo.routing": "live"})
    assert all(sample.routing is None for sample in trained)
    assert "routing_fallback" not in steps_of(Path("runs/run"))[-1]


def routed_batch(step: int, num_layers: int) -> TrainBatch:
    """Routes that the model would mostly not choose, and some tokens without."""
    batch, rng = make_batch(step), np.random.default_rng(step)
    samples = []
    for sample in batch.samples:
        recorded = (rng.random(sample.num_tokens) < 0.8) & (
            np.arange(sample.num_tokens) < sample.num_tokens - 1
        )
        all_experts = np.broadcast_to(np.arange(4, dtype=np.uint8), (int(recorded.sum()), num_layers, 4))
        experts = np.ascontiguousarray(rng.permuted(all_experts, axis=-1)[..., :2])
        samples.append(replace(sample, routing=Routing(experts=experts, recorded=recorded)))
    return replace(batch, samples=tuple(samples))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_layers", "ranks", "expert_ranks"),
    [("qwen3_moe", 2, 2, 1), ("qwen3_moe", 2, 2, 2), ("olmoe", 2, 4, 2), ("deepseek_v3", 1, 2, 2)],
)
def test_ranks_replay_as_one_process_does(
    tmp_path: Path, family: Any, num_layers: int, ranks: int, expert_ranks: int
) -> None:
    changes = {
        "algo.kl_coef": 0.1, "algo.loss": "decoupled", "trainer.minibatches": 2,
        "trainer.expert_ranks": expert_ranks,
    }  # fmt: skip
    model = make_model(tmp_path / "model", family)
    steps = range(1, 6)
    alone = single(model, tmp_path / "segments", **changes)
    expected = [alone.step(routed_batch(step, num_layers)) for step in steps]

    async def ranked_steps() -> list[StepResult]:
        async with ranked(model, tmp_path / "logs", ranks=ranks, **changes) as cluster:
            return [await cluster.trainer.step(routed_batch(step, num_layers)) for step in steps]

    for found, wanted in zip(within(100, ranked_steps), expected, strict=True):
        assert 0.3 < wanted.metrics["route_flips"] <= wanted.metrics["route_flips_worst"]
        for name in METRICS:
            assert found.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-5, abs=1e-6), name
