"""A trainer over several processes is the trainer in one process: same curve, same weights, same files."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_tools import VOCAB_SIZE, make_batch, make_model, ranked, single, within
from transformers import AutoModelForCausalLM

import headrace
from headrace import demo
from headrace.errors import RoleError, TrainingError
from headrace.launch.local import LocalCluster
from headrace.types import SamplingMask, StepResult, TrainBatch
from headrace.weights.shared_memory import SharedMemoryReceiver

STEPS = 10
METRICS = (
    "loss",
    "grad_norm",
    "expert_imbalance",
    "kl",
    "entropy",
    "lag_mean",
    "effective_samples",
    "mismatch_p99",
    "masked_fraction",
    "masked_by_m2po",
    "version_span_mean",
    "learning_rate",
)


def assert_same_step(found: StepResult, expected: StepResult) -> None:
    assert (found.step, found.version, found.skipped) == (expected.step, expected.version, expected.skipped)
    assert found.num_loss_tokens == expected.num_loss_tokens
    for name in METRICS:
        if name in expected.metrics:
            assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5, abs=1e-6), name


def assert_same_curve(found: list[StepResult], expected: list[StepResult]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_same_step(one, other)


def curve(trainer: Any, steps: range) -> list[StepResult]:
    return [trainer.step(make_batch(step)) for step in steps]


async def counters(cluster: LocalCluster) -> list[dict[str, float]]:
    """What each rank counted of its own work."""
    callers = [process.caller for process in cluster._processes]
    return [dict((await caller.call("status", deadline_s=10.0)).counters) for caller in callers]


def assert_shared(counted: list[dict[str, float]], name: str, total: int) -> None:
    """Every rank has its part, and nothing is anywhere twice."""
    parts = [counter[name] for counter in counted]
    assert sum(parts) == total and max(parts) < 1.3 * total / len(parts), (name, parts)


def published(manifest: Any) -> dict[str, np.ndarray]:
    blobs = SharedMemoryReceiver().receive(manifest)
    return {blob.name: np.array(blob.data).view(np.float32).reshape(blob.shape) for blob in blobs}


def test_two_ranks_train_publish_and_save_as_one_process_does(tmp_path: Path) -> None:
    # A vocabulary that two ranks cannot share evenly.
    model = make_model(tmp_path / "model", "llama", vocab_size=VOCAB_SIZE + 1)
    alone = single(model, tmp_path / "segments")
    expected = curve(alone, range(1, STEPS + 1))
    more = curve(alone, range(STEPS + 1, STEPS + 3))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()

    async def train() -> tuple[list[StepResult], dict[str, np.ndarray], list[dict[str, float]]]:
        async with ranked(model, tmp_path / "logs", ranks=2) as cluster:
            trainer = cluster.trainer
            found = [await trainer.step(make_batch(step)) for step in range(1, STEPS + 1)]
            await trainer.save(checkpoint)
            found += [await trainer.step(make_batch(step)) for step in range(STEPS + 1, STEPS + 3)]
            weights = published(await trainer.publish(STEPS + 2))
            return found, weights, await counters(cluster)

    found, weights, counted = within(60, train)
    assert_same_curve(found, expected + more)
    assert weights.keys() == published(alone.publish(STEPS + 2)).keys()
    for name, tensor in alone.model.state_dict().items():
        if name in weights:
            np.testing.assert_allclose(weights[name], tensor.numpy(), atol=1e-4, err_msg=name)
    # The last token of a sequence is not computed.
    num_tokens = sum(s.num_tokens - 1 for step in range(1, STEPS + 3) for s in make_batch(step).samples)
    assert_shared(counted, "num_tokens", num_tokens)
    assert_shared(counted, "num_weights", sum(p.numel() for p in alone.model.parameters()))
    resumed = single(model, tmp_path / "segments-2")
    assert resumed.load(checkpoint) == STEPS
    assert_same_curve(curve(resumed, range(STEPS + 1, STEPS + 3)), more)


MANY_THINGS = {
    **{"trainer.minibatches": 3, "algo.loss": "decoupled", "algo.kl_coef": 0.1},
    **{"algo.corrections": ["opsm", "m2po"], "algo.options": {"m2po.tau": 0.2}, "algo.guard": "scale"},
}
BALANCED = {"algo.options.balance.coef": 0.1, "algo.kl_coef": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks", "expert_ranks", "changes"),
    [
        ("qwen3", 2, 1, MANY_THINGS),
        ("qwen3", 4, 1, MANY_THINGS),
        ("qwen3_moe", 2, 1, {}),
        ("qwen3_moe", 4, 1, BALANCED),
        ("qwen3_moe", 2, 2, {}),
        ("qwen3_moe", 4, 4, BALANCED),
        ("qwen3_moe", 4, 2, BALANCED),
        ("olmoe", 2, 2, {}),
        ("deepseek_v3", 4, 2, BALANCED),
    ],
)
def test_more_ranks_and_models_give_the_single_curve(
    tmp_path: Path, family: Any, ranks: int, expert_ranks: int, changes: dict[str, Any]
) -> None:
    changes = {**changes, "trainer.expert_ranks": expert_ranks}
    model = make_model(tmp_path / "model", family)
    alone = single(model, tmp_path / "segments", **changes)
    expected = curve(alone, range(1, STEPS + 1))

    async def train() -> tuple[list[StepResult], list[dict[str, float]]]:
        async with ranked(model, tmp_path / "logs", ranks=ranks, **changes) as cluster:
            found = [await cluster.trainer.step(make_batch(step)) for step in range(1, STEPS + 1)]
            return found, await counters(cluster)

    found, counted = within(100, train)
    assert_same_curve(found, expected)
    assert_shared(counted, "num_weights", alone.num_weights)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("family", "expert_ranks"), [("llama", 1), ("qwen3_moe", 1), ("qwen3_moe", 2)])
def test_a_run_moves_from_two_ranks_to_four_to_one(tmp_path: Path, family: Any, expert_ranks: int) -> None:
    changes = {"algo.kl_coef": 0.1, "trainer.expert_ranks": expert_ranks}
    model = make_model(tmp_path / "model", family)
    expected = curve(single(model, tmp_path / "segments", **changes), range(1, 10))
    checkpoints = [tmp_path / "after-3", tmp_path / "after-6"]

    async def part(ranks: int, steps: range, load: Path | None, save: Path) -> list[StepResult]:
        save.mkdir()
        async with ranked(model, tmp_path / f"logs-{ranks}", ranks=ranks, **changes) as cluster:
            if load is not None:
                assert await cluster.trainer.load(load) == steps.start - 1
            found = [await cluster.trainer.step(make_batch(step)) for step in steps]
            await cluster.trainer.save(save)
            return found

    found = within(100, lambda: part(2, range(1, 4), None, checkpoints[0]))
    found += within(100, lambda: part(4, range(4, 7), checkpoints[0], checkpoints[1]))
    alone = single(model, tmp_path / "segments-2", **changes)
    assert alone.load(checkpoints[1]) == 6
    assert_same_curve(found + curve(alone, range(7, 10)), expected)
    exported = AutoModelForCausalLM.from_pretrained(checkpoints[1], dtype=torch.float32)
    alone.load(checkpoints[1])
    for name, tensor in alone.model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_trainer_and_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")

    async def train() -> None:
        async with ranked(model, tmp_path / "logs", ranks=2) as cluster:
            await cluster.trainer.step(make_batch(1))
            os.kill(cluster.pids["trainer-1"], signal.SIGSTOP)
            step = asyncio.create_task(cluster.trainer.step(make_batch(2)))
            await asyncio.sleep(0)  # the call is on its way before the rank dies
            os.kill(cluster.pids["trainer-1"], signal.SIGKILL)
            with pytest.raises(RoleError, match="trainer-1 died \\(killed by SIGKILL\\)"):
                await step
            with pytest.raises(RoleError):
                await cluster.trainer.step(make_batch(2))

    within(60, train)


@pytest.mark.slow
def test_ranks_agree_on_what_is_not_finite(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    batch = make_batch(2)
    batch.samples[0].advantages[batch.samples[0].loss_mask] = np.nan

    async def train(on_nonfinite: str) -> StepResult:
        changes = {"trainer.on_nonfinite": on_nonfinite}
        async with ranked(model, tmp_path / "logs", ranks=2, **changes) as cluster:
            await cluster.trainer.step(make_batch(1))
            return await cluster.trainer.step(batch)

    assert "not finite" in str(within(60, lambda: train("skip")).skipped)
    with pytest.raises(TrainingError, match="step 2: the loss is not finite"):
        within(60, lambda: train("stop"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_whole_run_trains_over_two_ranks_and_goes_on_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {
        **demo.prepare(tmp_path, warm_steps=10),
        "run.steps": 4,
        "run.console": "off",
        "run.name": "run",
        "run.checkpoint_every": 2,
        "rollout.group_size": 4,
        "rollout.groups_per_step": 2,
        "trainer.ranks": 2,
    }
    over_two = headrace.train(tasks=demo.tasks(64), reward=demo.exact, settings=settings)
    attempts = over_two.summary.attempts
    assert attempts["trained"] == 4 * 2 * 4 and set(attempts.values()) <= {0, 4 * 2 * 4}
    with_one = headrace.train(
        tasks=demo.tasks(64),
        reward=demo.exact,
        resume="runs/run",
        settings={**settings, "trainer.ranks": 1, "run.steps": 6},
    )
    assert with_one.num_steps == 6


def test_kept_sets_reach_the_ranks_and_are_trained_on_as_in_one_process(tmp_path: Path) -> None:
    """Some samples have them and some do not, so that ranks compute both kinds at the same time."""

    def masked(step: int) -> TrainBatch:
        batch, rng = make_batch(step), np.random.default_rng(step)
        samples = []
        for number, sample in enumerate(batch.samples):
            sets = [
                np.unique(np.append(rng.integers(0, 32, 6), token)) if sampled else np.zeros(0, np.int64)
                for token, sampled in zip(sample.token_ids, sample.loss_mask, strict=True)
            ]
            mask = SamplingMask(
                token_ids=np.concatenate(sets).astype(np.int32), offsets=np.cumsum([0, *map(len, sets)])
            )
            samples.append(sample if number % 3 == 0 else replace(sample, sampling_mask=mask))
        return replace(batch, samples=tuple(samples))

    model, steps = make_model(tmp_path / "model", "llama"), range(1, 6)
    alone = single(model, tmp_path / "segments")
    expected = [alone.step(masked(step)) for step in steps]
    assert all(0 < result.metrics["truncated_fraction"] < 1 for result in expected)

    async def train() -> list[StepResult]:
        async with ranked(model, tmp_path / "logs", ranks=2) as cluster:
            return [await cluster.trainer.step(masked(step)) for step in steps]

    found = within(60, train)
    assert_same_curve(found, expected)
    for one, other in zip(found, expected, strict=True):
        for name in ("kept_mass", "truncated_fraction"):
            assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-5), name
