"""An adapter trained over several processes is the adapter trained in one: same curve, same bytes, same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from rank_tools import VOCAB_SIZE, make_batch, make_model, ranked, settings, single, within
from run_tools import letters
from safetensors.torch import load_file
from test_ranks import MANY_THINGS, STEPS, assert_same_curve, assert_shared, counters, curve, published
from transformers import AutoModelForCausalLM
from weight_tools import make_engine

import headrace
from headrace import build, demo
from headrace.data.packing import pack
from headrace.observe.jsonl import read_events
from headrace.trainers.forward_check import plain_logprobs, probe_sample
from headrace.trainers.logprobs import row_tensors
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import StepResult, WeightManifest

LORA = {"lora.rank": 4, "trainer.learning_rate": 1e-2, "algo.kl_coef": 0.1}
IDS = np.random.default_rng(5).integers(0, VOCAB_SIZE, 25).astype(np.int32)


def logprobs(trainer: TorchTrainer) -> np.ndarray:
    (row,) = pack([probe_sample(IDS)], row_tokens=len(IDS))
    with torch.no_grad():
        return trainer._weights.values(row_tensors(row, device="cpu")).logprobs_N.numpy()


async def served(model: Path, manifest: WeightManifest, changes: dict[str, Any]) -> np.ndarray:
    """An engine's log-probabilities with the adapter that was published."""
    engine = make_engine(model, lora=build.lora(settings(**changes)))
    assert await engine.apply(manifest) == manifest.version
    (scores,) = await engine.score([IDS])
    await engine.close()
    return scores


def assert_same_bundle(found: WeightManifest, expected: WeightManifest) -> None:
    assert (found.kind, found.policy, found.num_bytes) == ("adapter", "policy", expected.num_bytes)
    assert found.digest == expected.digest
    mine, other = published(found), published(expected)
    assert list(mine) == list(other)
    assert all(np.array_equal(mine[name], other[name]) for name in mine)


DORA = pytest.param({"lora.dora": True}, marks=pytest.mark.slow, id="dora")


@pytest.mark.parametrize("more", [pytest.param({}, id="lora"), DORA])
def test_two_ranks_train_publish_and_save_an_adapter_as_one_process_does(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    changes = {**LORA, **more}
    model = make_model(tmp_path / "model", "llama")
    alone = single(model, tmp_path / "segments", **changes)
    expected = curve(alone, range(1, STEPS + 3))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    # With the checkpoint of the ranks in one process: the same weights, so every bit must be the same.
    resumed = single(model, tmp_path / "segments-2", **changes)

    async def train() -> tuple[list[StepResult], np.ndarray, list[dict[str, float]]]:
        async with ranked(model, tmp_path / "logs", ranks=2, **changes) as cluster:
            trainer = cluster.trainer
            found = [await trainer.step(make_batch(step)) for step in range(1, STEPS + 1)]
            await trainer.save(checkpoint)
            assert resumed.load(checkpoint) == STEPS
            manifest = await trainer.publish(STEPS)
            assert_same_bundle(manifest, resumed.publish(STEPS))
            scores = await served(model, manifest, changes)
            found += [await trainer.step(make_batch(step)) for step in range(STEPS + 1, STEPS + 3)]
            return found, scores, await counters(cluster)

    found, scores, counted = within(60, train)
    assert_same_curve(found, expected)
    assert_shared(counted, "num_weights", alone.num_weights)
    np.testing.assert_allclose(scores[1:], logprobs(resumed), atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, checkpoint).eval()
    with torch.no_grad():
        np.testing.assert_allclose(plain_logprobs(loaded, IDS).numpy(), logprobs(resumed), atol=1e-5)
    again = tmp_path / "again"
    again.mkdir()
    resumed.save(again)
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert (checkpoint / name).read_bytes() == (again / name).read_bytes(), name
    assert not list(checkpoint.glob("model*")) and not list(checkpoint.glob("reference*"))
    assert_same_curve(curve(resumed, range(STEPS + 1, STEPS + 3)), expected[STEPS:])


def test_an_adapter_moves_from_one_process_to_two(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    alone = single(model, tmp_path / "segments", **LORA)
    curve(alone, range(1, 4))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    alone.save(checkpoint)
    here = alone.publish(3)

    async def go_on() -> list[StepResult]:
        async with ranked(model, tmp_path / "logs", ranks=2, **LORA) as cluster:
            assert await cluster.trainer.load(checkpoint) == 3
            assert_same_bundle(await cluster.trainer.publish(3), here)
            return [await cluster.trainer.step(make_batch(step)) for step in range(4, 8)]

    assert_same_curve(within(60, go_on), curve(alone, range(4, 8)))


EXPERTS = {"lora.targets": ["q_proj", "v_proj", "experts"]}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "ranks", "changes"),
    [
        ("llama", 4, {}),
        ("llama", 4, {"lora.dora": True}),
        ("qwen3", 2, MANY_THINGS),
        ("qwen3", 4, {"lora.targets": ["q_proj", "down_proj"], **MANY_THINGS}),
        ("qwen3_moe", 2, EXPERTS),
        ("qwen3_moe", 4, EXPERTS),
        ("olmoe", 2, EXPERTS),
        ("qwen3_moe", 2, {"trainer.expert_ranks": 2}),
        ("qwen3_moe", 4, {"trainer.expert_ranks": 2, "algo.options.balance.coef": 0.1}),
        ("qwen3_moe", 2, {"trainer.expert_ranks": 2, **EXPERTS}),
        ("qwen3_moe", 4, {"trainer.expert_ranks": 2, **EXPERTS}),
        ("deepseek_v3", 4, {"trainer.expert_ranks": 2, "lora.targets": ["all-linear", "experts"]}),
    ],
)
def test_more_ranks_and_models_give_the_single_curve(
    tmp_path: Path, family: Any, ranks: int, changes: dict[str, Any]
) -> None:
    changes = {**LORA, **changes}
    model = make_model(tmp_path / "model", family)
    alone = single(model, tmp_path / "segments", **changes)
    expected = curve(alone, range(1, STEPS + 1))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()

    async def train() -> list[StepResult]:
        async with ranked(model, tmp_path / "logs", ranks=ranks, **changes) as cluster:
            found = [await cluster.trainer.step(make_batch(step)) for step in range(1, STEPS + 1)]
            await cluster.trainer.save(checkpoint)
            assert alone.load(checkpoint) == STEPS
            assert_same_bundle(await cluster.trainer.publish(STEPS), alone.publish(STEPS))
            return found

    assert_same_curve(within(200, train), expected)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {**EXPERTS, "trainer.expert_ranks": 2}], ids=["layers", "experts"])
def test_in_bf16_the_model_is_sliced_in_bf16_and_the_adapter_in_float32(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Ranks cut batches into other rows, whose gradients are rounded otherwise."""
    changes = {**LORA, "model.dtype": "bfloat16", **changes}
    model = make_model(tmp_path / "model", "qwen3_moe")
    alone = single(model, tmp_path / "segments", **changes)
    expected = curve(alone, range(1, 4))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()

    async def train() -> list[StepResult]:
        async with ranked(model, tmp_path / "logs", ranks=2, **changes) as cluster:
            found = [await cluster.trainer.step(make_batch(step)) for step in range(1, 4)]
            await cluster.trainer.save(checkpoint)
            assert alone.load(checkpoint) == 3
            manifest, other = await cluster.trainer.publish(3), alone.publish(3)
            assert (manifest.num_bytes, manifest.digest) == (other.num_bytes, other.digest)
            return found

    for found, wanted in zip(within(100, train), expected, strict=True):
        assert found.metrics["grad_norm"] == pytest.approx(wanted.metrics["grad_norm"], rel=0.05)
    assert {t.dtype for t in load_file(checkpoint / "adapter_model.safetensors").values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("targets", [["all-linear"], ["experts"]], ids=["layers", "experts"])
def test_a_whole_run_trains_an_adapter_over_two_ranks_and_goes_on_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = {
        **demo.prepare(tmp_path, warm_steps=10),
        **demo.ADAPTER_SETTINGS,
        "lora.rank": 4,
        "lora.targets": targets,
        "rollout.max_lag": 0,
        "run.steps": 4,
        "run.console": "off",
        "run.name": "run",
        "run.checkpoint_every": 2,
        "rollout.group_size": 4,
        "rollout.groups_per_step": 2,
        "trainer.ranks": 2,
    }
    if targets == ["experts"]:
        vocab_size = AutoModelForCausalLM.from_pretrained(chosen["model.path"]).config.vocab_size
        make_model(Path(chosen["model.path"]), "qwen3_moe", vocab_size=vocab_size)
    over_two = headrace.train(tasks=demo.tasks(64), reward=letters, settings=chosen)
    assert over_two.summary.attempts["trained"] == 4 * 2 * 4
    saved = load_file(over_two.model_dir / "adapter_model.safetensors")
    assert all(tensor.any() for tensor in saved.values()), "some part of the adapter was not trained"
    with_one = headrace.train(
        tasks=demo.tasks(64),
        reward=letters,
        resume="runs/run",
        settings={**chosen, "trainer.ranks": 1, "run.steps": 6},
    )
    assert with_one.num_steps == 6
    steps = [event for event in read_events(with_one.run_dir / "events.jsonl") if event["event"] == "step"]
    assert len(steps) == 6 and all(event["metrics"]["mismatch_max"] < 1e-5 for event in steps)
