"""Trainers over several real processes, and batches for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headrace import build, teaching
from headrace.config import from_dict
from headrace.config.parameters import algo_parameters, loss_options, pivot_parameters
from headrace.launch.local import LocalCluster, LocalLauncher
from headrace.models.loading import Family, make_tiny_model
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import NO_KV, Sample, TrainBatch
from headrace.weights.segment_directory import create_segment_directory
from headrace.weights.shared_memory import SharedMemorySender

VOCAB_SIZE = 32
T = TypeVar("T")
SETTINGS = {
    "trainer.learning_rate": 3e-3,
    "trainer.row_tokens": 24,
    "run.stall_s": 60.0,
    "model.device": "cpu",
    "run.steps": 100,
}


def make_batch(step: int) -> TrainBatch:
    """Ragged samples in groups of two, some a version old; every fifth batch has fewer than four ranks need."""
    rng = np.random.default_rng(step)
    num_samples = 3 if step % 5 == 0 else 10
    samples = []
    for i in range(num_samples):
        prompt, sampled = int(rng.integers(1, 6)), int(rng.integers(1, 14))
        num_tokens = prompt + sampled
        mask = np.arange(num_tokens) >= prompt
        ages = np.where(rng.random(num_tokens) < 0.5, step - 1, max(step - 2, 0))
        samples.append(
            Sample(
                group=i // 2,
                attempt=i % 2,
                token_ids=rng.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -rng.uniform(2.5, 4.5, num_tokens), 0).astype(np.float32),
                versions=np.where(mask, ages, -1).astype(np.int32),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                temperature=1.0,
                kv_versions=NO_KV,
            )
        )
    return TrainBatch(step=step, version=step - 1, samples=tuple(samples))


def make_model(directory: Path, family: Family, *, vocab_size: int = VOCAB_SIZE) -> Path:
    make_tiny_model(
        directory, family=family, vocab_size=vocab_size, hidden_size=32, num_heads=4, init_std=0.15
    )
    return directory


def settings(**changes: Any) -> Any:
    return from_dict({**SETTINGS, **changes})


def single(model: Path, segments: Path, **changes: Any) -> TorchTrainer:
    """The same trainer in this process and alone, as ``build`` makes it."""
    from headrace.models.loading import load_model

    s = settings(**{**changes, "trainer.expert_ranks": 1})
    parameters = algo_parameters(s)
    return TorchTrainer(
        load_model(model),
        sender=SharedMemorySender(segments),
        ledger=TimeLedger(TRAINER_ACTIVITIES),
        loss=s.algo.loss,
        corrections=s.algo.corrections,
        options=loss_options(s),
        guard=s.algo.guard,
        kl=parameters.get("kl.estimator", "none"),
        kl_coef=s.algo.kl_coef,
        balance_coef=parameters["balance.coef"],
        echo_coef=parameters["echo.coef"],
        pivot_weight=pivot_parameters(s)["weight"],
        max_tokens=s.rollout.max_tokens,
        learning_rate=s.trainer.learning_rate,
        total_steps=s.run.steps,
        row_tokens=s.trainer.row_tokens,
        minibatches=s.trainer.minibatches,
        on_nonfinite=s.trainer.on_nonfinite,
        compute_dtype="bf16" if build.dtype(s) == "bfloat16" else "fp32",
        lora=build.lora(s),
        distillation=teaching.distillation(s),
    )


@asynccontextmanager
async def ranked(model: Path, logs: Path, *, ranks: int, **changes: Any) -> AsyncIterator[LocalCluster]:
    """A cluster of nothing but the ranks of one trainer."""
    s = settings(**{"trainer.ranks": ranks, **changes})
    directory = create_segment_directory()
    told = {
        "settings": s.model_dump(mode="json", exclude_none=True),
        "model": str(model),
        "segments": str(directory / "weights"),
    }
    cluster = await LocalLauncher(
        build._trainer_roles(s, told),
        log_dir=logs,
        start_deadline_s=100.0,
        directory=directory,
        num_minibatches=s.trainer.minibatches,
    ).spawn()
    try:
        yield cluster
    finally:
        await cluster.close()


def within(deadline_s: float, work: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(deadline_s):
            return await work()

    return asyncio.run(bounded())
