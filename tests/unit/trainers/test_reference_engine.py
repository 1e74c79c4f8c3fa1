"""Log-probabilities of the starting policy from an engine give the losses and gradients of a copy in the trainer."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.engines.make import torch_engine
from headrace.errors import TrainingError
from headrace.timekeeping import ENGINE_ACTIVITIES, TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import TrainBatch

KL = {"kl": "k3", "kl_coef": 0.5, "learning_rate": 1e-3}


def with_references(engine, batch: TrainBatch) -> TrainBatch:
    samples = tuple(
        replace(sample, ref_logprobs=engine.score([sample.token_ids], sample.temperature)[0])
        for sample in batch.samples
    )
    return replace(batch, samples=samples)


@pytest.fixture
def engine(make_model):
    return torch_engine(make_model(), ledger=TimeLedger(ENGINE_ACTIVITIES), max_running=1, kv_tokens=64)


def trainer(model, **settings):
    return TorchTrainer(model, sender=None, ledger=TimeLedger(TRAINER_ACTIVITIES), **KL, **settings)


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_losses_and_gradients_are_those_of_a_reference_in_the_trainer(
    engine, make_model, make_batch, share_prefixes
):
    kept = trainer(make_model(), share_prefixes=share_prefixes)
    without = trainer(make_model(), share_prefixes=share_prefixes, keep_reference=False)
    for step in range(1, 6):
        batch = make_batch(step)
        gradients = []
        for one, given in ((kept, batch), (without, with_references(engine, batch))):
            (rows,) = one.prepare(given)
            records = one.accumulate(rows, before_update=True)
            assert all(float(record.outcome.values["kl"]) > 0 for record in records) or step == 1
            gradients.append([p.grad.clone() for p in one.model.parameters()])
            one.optimizer.zero_grad(set_to_none=True)
        for expected, got in zip(*gradients, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        expected, got = kept.step(batch).metrics, without.step(with_references(engine, batch)).metrics
        for name in ("loss", "kl", "grad_norm"):
            assert got[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def test_the_trainer_holds_no_second_model_and_saves_none(tmp_path, engine, make_model, make_batch):
    lean = trainer(make_model(), keep_reference=False)
    assert lean._reference is None
    lean.step(with_references(engine, make_batch(1)))
    lean.save(tmp_path)
    assert not list(tmp_path.glob("reference*"))
    again = trainer(make_model(seed=3), keep_reference=False)
    assert again.load(tmp_path) == 1
    second = with_references(engine, make_batch(2))
    assert again.step(copy.deepcopy(second)).metrics["loss"] == lean.step(second).metrics["loss"]


def test_a_sample_without_them_is_refused(make_model, make_batch):
    with pytest.raises(TrainingError, match=r"sample 0/0.*kl\.reference"):
        trainer(make_model(), keep_reference=False).step(make_batch(1))


def test_minibatches_are_checked_too(engine, make_model, make_batch):
    batch = with_references(engine, make_batch(1))
    last = replace(batch.samples[-1], ref_logprobs=None)
    broken = replace(batch, samples=(*batch.samples[:-1], last))
    with pytest.raises(TrainingError, match="without the reference's log-probabilities"):
        trainer(make_model(), keep_reference=False, minibatches=2).step(broken)
    assert np.isfinite(batch.samples[0].ref_logprobs).all()
