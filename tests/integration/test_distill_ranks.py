"""Teachers' scores dealt out to several ranks give the step that one trainer makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rank_tools import VOCAB_SIZE, make_batch, make_model, ranked, single, within

from headrace.types import TeacherScores, TrainBatch

STEPS = 4


def taught_batch(step: int) -> TrainBatch:
    """Two thirds of the samples have a teacher, so that ranks have different shares of those."""
    rng = np.random.default_rng([step, 1])

    def scores(num_tokens: int) -> TeacherScores:
        probs = rng.dirichlet(np.ones(5), num_tokens)[:, :4]
        return TeacherScores(
            logprobs=-rng.uniform(0.5, 4.0, num_tokens).astype(np.float32),
            top_ids=np.stack([rng.permutation(VOCAB_SIZE)[:4] for _ in range(num_tokens)]).astype(np.int32),
            top_logprobs=np.log(probs).astype(np.float32),
        )

    batch = make_batch(step)
    samples = tuple(
        replace(sample, teacher=scores(sample.num_tokens)) if i % 3 else sample
        for i, sample in enumerate(batch.samples)
    )
    return replace(batch, samples=samples)


@pytest.mark.parametrize("divergence", ["sampled", "forward"])
def test_two_ranks_are_one_trainer(tmp_path, divergence):
    changes = {"distill.teachers": {"a": "x"}, "distill.divergence": divergence, "trainer.minibatches": 2}
    model = make_model(tmp_path / "model", "llama")
    alone = single(model, tmp_path / "segments", **changes)
    expected = [alone.step(taught_batch(step)) for step in range(1, STEPS + 1)]

    async def together():
        async with ranked(model, tmp_path / "logs", ranks=2, **changes) as cluster:
            return [await cluster.trainer.step(taught_batch(step)) for step in range(1, STEPS + 1)]

    for found, wanted in zip(within(100.0, together), expected, strict=True):
        assert wanted.metrics["teacher_divergence"] > 0.1
        for name in ("loss", "grad_norm", "teacher_divergence"):
            assert found.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-5, abs=1e-6), name
