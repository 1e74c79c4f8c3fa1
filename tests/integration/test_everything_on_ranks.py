"""Branches, teachers, kept sets, cut-off answers and routes in one batch: ranks make one trainer's step of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rank_tools import VOCAB_SIZE, make_batch, make_model, ranked, single, within

from headrace.types import Routing, Sample, SamplingMask, TeacherScores, TrainBatch

STEPS = 4
METRICS = (
    "loss", "grad_norm", "kl", "teacher_divergence", "masked_by_truncated", "masked_by_tis", "kept_mass",
    "truncated_fraction", "route_flips", "routing_fallback", "expert_imbalance", "effective_samples",
)  # fmt: skip


def kept_sets(sample: Sample, rng: np.random.Generator) -> SamplingMask:
    """Six ids on about half of the loss tokens."""
    rows: list[list[int]] = []
    for token, is_loss in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        others = rng.permutation(np.delete(np.arange(VOCAB_SIZE), token))[:5].tolist()
        rows.append(sorted([token, *others]) if is_loss and rng.random() < 0.5 else [])
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return SamplingMask(token_ids=np.array([i for row in rows for i in row], np.int32), offsets=offsets)


def routes(sample: Sample, rng: np.random.Generator) -> Routing:
    recorded = np.arange(sample.num_tokens) < sample.num_tokens - 1
    experts = [[rng.permutation(4)[:2] for _ in range(2)] for _ in range(int(recorded.sum()))]
    return Routing(experts=np.array(experts, np.uint8).reshape(-1, 2, 2), recorded=recorded)


def full_batch(step: int) -> TrainBatch:
    """No feature is on all samples, and none on the same samples as another."""
    rng = np.random.default_rng([step, 7])
    samples = []
    for i, sample in enumerate(make_batch(step).samples):
        gap = -rng.uniform(0.5, 4.0, sample.num_tokens).astype(np.float32)
        samples.append(
            replace(
                sample,
                component="pivot" if sample.group >= 3 else "main",
                finish_reason="length" if i % 4 == 1 else "stop",
                teacher=TeacherScores(logprobs=gap) if i % 3 else None,
                sampling_mask=kept_sets(sample, rng) if i % 2 else None,
                routing=routes(sample, rng) if i % 5 else None,
            )
        )
    return TrainBatch(step=step, version=step - 1, samples=tuple(samples))


def test_two_ranks_are_one_trainer_with_everything_on(tmp_path):
    changes = {
        "distill.teachers": {"a": "x"},
        "pivots.branches": 2,
        "pivots.options": {"weight": 0.5},
        "algo.corrections": ["tis"],
        "algo.options": {"truncated.mode": "mask", "balance.coef": 0.01},
        "algo.kl_coef": 0.1,
        "trainer.minibatches": 2,
    }
    model = make_model(tmp_path / "model", "qwen3_moe")
    alone = single(model, tmp_path / "segments", **changes)
    expected = [alone.step(full_batch(step)) for step in range(1, STEPS + 1)]

    async def together():
        async with ranked(model, tmp_path / "logs", ranks=2, **changes) as cluster:
            return [await cluster.trainer.step(full_batch(step)) for step in range(1, STEPS + 1)]

    for found, wanted in zip(within(100.0, together), expected, strict=True):
        assert found.metrics.keys() == wanted.metrics.keys()
        assert found.num_loss_tokens == wanted.num_loss_tokens
        for name in METRICS:
            assert found.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-4, abs=1e-6), name
