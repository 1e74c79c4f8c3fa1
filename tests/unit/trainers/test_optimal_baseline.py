"""VCPO's baseline from gradients of single attempts, against a plain model that is asked for them one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, TrainingError
from headrace.models.lora import LoraSpec
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.optimal_baseline import over_optimal_baselines
from headrace.trainers.ranks import join_ranks
from headrace.trainers.torch_trainer import TorchTrainer


@pytest.fixture
def build(make_model, sender):
    def make(**settings):
        settings = {"learning_rate": 3e-3, "row_tokens": 20, "optimal_baseline": True, **settings}
        return TorchTrainer(make_model(), sender=sender, ledger=TimeLedger(TRAINER_ACTIVITIES), **settings)

    return make


@pytest.fixture
def batch(make_batch):
    """Four groups of two attempts, of which the last has two samples; advantages are returns."""
    made = make_batch(1, num_samples=9)
    *rest, last = made.samples
    one_more = replace(
        last, group=3, attempt=1, advantages=np.where(last.loss_mask, rest[-1].advantages.max(), 0)
    )
    rest[-1] = replace(rest[-1], advantages=np.where(rest[-1].loss_mask, rest[-1].advantages.max(), 0))
    return replace(made, samples=(*rest, one_more))


def by_attempt(batch):
    attempts: dict = {}
    for sample in batch.samples:
        attempts.setdefault(sample.group, {}).setdefault(sample.attempt, []).append(sample)
    return attempts


def plain_measure(model, samples):
    """Log ratio and squared gradient norm of an attempt, from the model's own forward."""
    total, log_weight = torch.zeros(()), 0.0
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids).long()
        logprobs = (model(ids[None]).logits[0] / sample.temperature).log_softmax(-1)
        for t in np.flatnonzero(sample.loss_mask):
            value = logprobs[t - 1, ids[t]]
            total = total + value
            log_weight += float(value.detach()) - float(sample.behavior_logprobs[t])
    model.zero_grad()
    total.backward()
    return log_weight, sum(float(p.grad.square().sum()) for p in model.parameters())


def expected_baselines(model, batch):
    baselines = {}
    for group, attempts in by_attempt(batch).items():
        measured = [plain_measure(model, samples) for samples in attempts.values()]
        shares = [math.exp(log_weight) ** 2 * square for log_weight, square in measured]
        returns = [
            float(samples[0].advantages.sum() / samples[0].num_loss_tokens) for samples in attempts.values()
        ]
        baselines[group] = sum(s * r for s, r in zip(shares, returns, strict=True)) / sum(shares)
    return baselines


def with_baselines(batch, baselines):
    samples = [
        replace(s, advantages=np.where(s.loss_mask, s.advantages - baselines[s.group], 0).astype(np.float32))
        for s in batch.samples
    ]
    return replace(batch, samples=tuple(samples))


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_step_is_one_on_advantages_over_the_formulas_baselines(minibatches, batch, build, make_model):
    expected = with_baselines(batch, expected_baselines(make_model(), batch))
    found = build(minibatches=minibatches).step(batch)
    plain = build(minibatches=minibatches, optimal_baseline=False).step(expected)
    shift = found.metrics.pop("baseline_shift")
    assert shift > 1e-3
    assert found.metrics == pytest.approx(plain.metrics, rel=1e-4, abs=1e-6)


def test_every_attempt_is_measured_as_a_plain_model_would(batch, build, make_model):
    trainer, model = build(), make_model()
    for attempts in by_attempt(batch).values():
        for samples in attempts.values():
            assert trainer._measure(samples) == pytest.approx(plain_measure(model, samples), rel=1e-4)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_measuring_leaves_no_trace_in_the_step(batch, build):
    """Equal returns are their own baseline, so such a step does what one without a reward does."""

    def paid_alike(sample):
        return replace(sample, advantages=np.where(sample.loss_mask, 0.5, 0).astype(np.float32))

    equal = replace(batch, samples=tuple(map(paid_alike, batch.samples)))
    trainer = build()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    result = trainer.step(equal)
    assert result.metrics["grad_norm"] == pytest.approx(0.0, abs=1e-6)
    assert result.metrics["baseline_shift"] == pytest.approx(0.0, abs=1e-7)
    assert all(torch.allclose(p, before[name], atol=1e-6) for name, p in trainer.model.named_parameters())


OTHER_WEIGHTS = {"bf16": {"compute_dtype": "bf16"}, "lora": {"lora": LoraSpec(rank=4, alpha=8.0)}}


@pytest.mark.parametrize("settings", OTHER_WEIGHTS.values(), ids=OTHER_WEIGHTS)
def test_masters_and_adapters_have_gradients_of_their_own(settings, batch, build):
    metrics = build(**settings).step(batch).metrics
    assert 0 < metrics["baseline_shift"] < 2 and math.isfinite(metrics["loss"])


def test_a_world_of_one_measures_the_same(batch, build, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ranks = join_ranks(0, 1, device="cpu", meeting_point=tmp_path / "ranks", deadline_s=30.0)
    found, expected = (build(**where).step(batch) for where in ({"ranks": ranks}, {}))
    ranks.close()
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)


class TwoRanks:
    size = 2


def test_several_ranks_and_returns_by_token_are_refused(build, make_batch):
    with pytest.raises(ConfigError, match="2 ranks"):
        build(ranks=TwoRanks())
    made = make_batch(1)
    by_token = replace(made.samples[0], advantages=np.arange(made.samples[0].num_tokens, dtype=np.float32))
    with pytest.raises(TrainingError, match=r"sample 0/0.*vcpo"):
        over_optimal_baselines([replace(made, samples=(by_token, *made.samples[1:]))], lambda _: (0.0, 1.0))
