"""What an environment answered, dealt out to several ranks, gives the step that one trainer makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rank_tools import make_batch, make_model, ranked, single, within

from headrace.types import Sample, TrainBatch

STEPS = 4


def answered(sample: Sample) -> Sample:
    """Tokens 2 and 3 after the first sampled one are the environment's; not every sample is long enough."""
    place = np.arange(sample.num_tokens) - int(sample.loss_mask.argmax())
    its = (place == 2) | (place == 3)
    return replace(
        sample,
        loss_mask=sample.loss_mask & ~its,
        versions=np.where(its, -1, sample.versions).astype(np.int32),
    )


def turns_batch(step: int) -> TrainBatch:
    batch = make_batch(step)
    return replace(batch, samples=tuple(map(answered, batch.samples)))


def test_two_ranks_are_one_trainer(tmp_path):
    changes = {"algo.options": {"echo.coef": 0.5}, "trainer.minibatches": 2}
    model = make_model(tmp_path / "model", "llama")
    alone = single(model, tmp_path / "segments", **changes)
    expected = [alone.step(turns_batch(step)) for step in range(1, STEPS + 1)]

    async def together():
        async with ranked(model, tmp_path / "logs", ranks=2, **changes) as cluster:
            return [await cluster.trainer.step(turns_batch(step)) for step in range(1, STEPS + 1)]

    for found, wanted in zip(within(100.0, together), expected, strict=True):
        assert wanted.metrics["environment_tokens"] > 4
        for name in ("loss", "grad_norm", "environment_loss", "environment_tokens"):
            assert found.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-5, abs=1e-6), name
