"""The distillation part of a step's loss: its value, its gradient, its own denominator."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.algos import distillation
from headrace.data.dealing import deal
from headrace.engines.make import torch_engine
from headrace.errors import ConfigError, TrainingError
from headrace.timekeeping import ENGINE_ACTIVITIES, TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.distilling import Distillation
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import SamplingMask, TrainBatch
from headrace.wire import decode, encode

DIVERGENCES = ("sampled", "forward", "reverse")


@pytest.fixture
def teach(make_model):
    """Batches scored by a model of other weights; ``alone`` without any advantage."""
    engine = torch_engine(
        make_model(seed=1), ledger=TimeLedger(ENGINE_ACTIVITIES), max_running=1, kv_tokens=64
    )

    def scored(sample, *, alone: bool, top_k: int):
        (teacher,) = engine.score_top([sample.token_ids], top_k, sample.temperature)
        advantages = np.zeros_like(sample.advantages) if alone else sample.advantages
        return replace(sample, teacher=teacher, advantages=advantages)

    def teach(batch: TrainBatch, *, alone: bool = True, top_k: int = 5) -> TrainBatch:
        return replace(
            batch, samples=tuple(scored(sample, alone=alone, top_k=top_k) for sample in batch.samples)
        )

    return teach


def trainer(model, divergence: str = "forward", coef: float = 1.0, **settings):
    return TorchTrainer(
        model,
        sender=None,
        ledger=TimeLedger(TRAINER_ACTIVITIES),
        distillation=Distillation(divergence=divergence, coef=coef),
        **{"learning_rate": 1e-3, **settings},
    )


def gradients(one: TorchTrainer, batch: TrainBatch) -> list[torch.Tensor]:
    (rows,) = one.prepare(batch)
    one.accumulate(rows, before_update=True)
    found = [p.grad.clone() for p in one.model.parameters()]
    one.optimizer.zero_grad(set_to_none=True)
    return found


def by_hand(model, batch: TrainBatch, divergence: str) -> torch.Tensor:
    """The mean over all tokens that have a teacher, from plain forward passes."""
    parts, gaps = [], []
    taught = [sample for sample in batch.samples if sample.teacher is not None]
    for sample in taught:
        mask = sample.loss_mask
        gaps.append(sample.behavior_logprobs[mask] - sample.teacher.logprobs[mask])
    baseline = float(np.concatenate(gaps).mean())
    for sample in taught:
        ids, at = torch.from_numpy(sample.token_ids.astype(np.int64)), np.flatnonzero(sample.loss_mask)
        full = (model(input_ids=ids[None]).logits[0] / sample.temperature).log_softmax(-1)[at - 1]
        if divergence == "sampled":
            own = full.gather(1, ids[at][:, None])[:, 0]
            behavior, teacher = (
                torch.from_numpy(v[at]) for v in (sample.behavior_logprobs, sample.teacher.logprobs)
            )
            parts.append(distillation.sampled(own, behavior, teacher, baseline=baseline).loss_T)
        else:
            top_ids = torch.from_numpy(sample.teacher.top_ids[at].astype(np.int64))
            top = torch.from_numpy(sample.teacher.top_logprobs[at])
            parts.append(distillation.COMPUTED[divergence](full.gather(1, top_ids), top).loss_T)
    return torch.cat(parts).mean()


@pytest.mark.parametrize(("row_tokens", "share_prefixes"), [(16, False), (10_000, True)])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradients_are_those_of_plain_forward_passes(
    make_model, make_batch, teach, divergence, row_tokens, share_prefixes
):
    batch, model = teach(make_batch(num_samples=8)), make_model()
    (2.0 * by_hand(model, batch, divergence)).backward()
    expected = [p.grad for p in model.parameters()]
    one = trainer(make_model(), divergence, 2.0, row_tokens=row_tokens, share_prefixes=share_prefixes)
    for got, wanted in zip(gradients(one, batch), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5 * max(1.0, float(wanted.abs().max())), rtol=0)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_either_part_has_its_own_denominator(make_model, make_batch, teach, divergence):
    """Half of the samples have a teacher, the others an advantage: the sum of both parts, each as if alone."""
    plain, taught = make_batch(num_samples=8), teach(make_batch(num_samples=8))
    pairs = list(zip(plain.samples, taught.samples, strict=True))
    mixed = replace(plain, samples=tuple(a if i % 2 else b for i, (a, b) in enumerate(pairs)))
    without = replace(mixed, samples=tuple(replace(s, teacher=None) for s in mixed.samples))
    alone = replace(mixed, samples=tuple(b for i, (_, b) in enumerate(pairs) if not i % 2))
    model = make_model()
    both, rl, pull = (gradients(trainer(make_model(), divergence), b) for b in (mixed, without, alone))
    for whole, a, b in zip(both, rl, pull, strict=True):
        torch.testing.assert_close(whole, a + b, atol=2e-5, rtol=1e-4)
    one = trainer(model, divergence)
    found = one.step(mixed).metrics["teacher_divergence"]
    expected = trainer(make_model(), divergence).step(alone).metrics["teacher_divergence"]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_a_student_that_is_its_teacher_stays(make_model, make_batch, teach, divergence):
    batch = teach(make_batch(), top_k=32)
    one = trainer(make_model(seed=1), divergence)
    assert max(float(g.abs().max()) for g in gradients(one, batch)) < 1e-4
    assert one.step(batch).metrics["teacher_divergence"] < 1e-4


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_steps_bring_it_down(make_model, make_batch, teach, divergence):
    one, batch = trainer(make_model(), divergence, learning_rate=5e-3, minibatches=2), teach(make_batch())
    seen = [
        one.step(replace(batch, step=step, version=step - 1)).metrics["teacher_divergence"]
        for step in range(1, 21)
    ]
    assert seen[-1] < 0.5 * seen[0]


def test_scores_that_cannot_be_used_are_named(make_model, make_batch, teach):
    batch = teach(make_batch())
    first = batch.samples[0]
    blind = replace(first, teacher=replace(first.teacher, top_ids=None, top_logprobs=None))
    with pytest.raises(TrainingError, match=r"sample 0/0: .*distill\.divergence to sampled"):
        trainer(make_model(), "forward").step(replace(batch, samples=(blind, *batch.samples[1:])))
    trainer(make_model(), "sampled").step(replace(batch, samples=(blind, *batch.samples[1:])))
    mask = SamplingMask(token_ids=np.zeros(0, np.int32), offsets=np.zeros(first.num_tokens + 1, np.int64))
    cut = replace(batch, samples=(replace(first, sampling_mask=mask),))
    with pytest.raises(TrainingError, match=r"sample 0/0: its distribution was truncated"):
        Distillation(divergence="reverse").check([cut])
    with pytest.raises(ConfigError, match="coef"):
        Distillation(coef=0.0)
    with pytest.raises(ConfigError, match="divergence 'jsd' is unknown"):
        Distillation(divergence="jsd")


def test_kept_sets_are_never_read_as_the_whole_vocabulary(make_model, make_batch, teach):
    """Whether or not the sample that was cut is the one that has a teacher."""

    def only_what_was_drawn(sample):
        ids = sample.token_ids[sample.loss_mask]
        offsets = np.concatenate([[0], np.cumsum(sample.loss_mask)]).astype(np.int64)
        return replace(sample, sampling_mask=SamplingMask(token_ids=ids, offsets=offsets))

    batch = teach(make_batch())
    first, *others = batch.samples
    cut = replace(batch, samples=(replace(only_what_was_drawn(first), teacher=None), *others))
    with pytest.raises(TrainingError, match=r"sample 0/0: its distribution was truncated"):
        trainer(make_model(), "reverse").step(cut)
    # A teacher may have said more than this divergence asks for.
    cut = replace(batch, samples=tuple(map(only_what_was_drawn, batch.samples)))
    one = trainer(make_model(), "sampled")
    (rows,) = one.prepare(cut)
    for record in one.accumulate(rows, before_update=True):
        assert not record.policy_logprobs_N.any()


def test_scores_survive_wire_and_dealing(make_batch, teach):
    batch = teach(make_batch(num_samples=6))
    batch = replace(batch, samples=(replace(batch.samples[0], teacher=None), *batch.samples[1:]))
    arrived = [decode(encode(share)) for share in deal(batch, num_ranks=2, num_minibatches=2)]
    samples = {(s.group, s.attempt): s for parts in arrived for part in parts for s in part.samples}
    assert len(samples) == 6
    for sample in batch.samples:
        got = samples[sample.group, sample.attempt].teacher
        if sample.teacher is None:
            assert got is None
            continue
        for name in ("logprobs", "top_ids", "top_logprobs"):
            expected, found = getattr(sample.teacher, name), getattr(got, name)
            assert np.array_equal(found, expected) and found.dtype == expected.dtype, name


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_moments_are_told_of_slopes_only_where_the_head_keeps_them(
    make_model, make_batch, teach, monkeypatch, divergence
):
    """Comparing with a teacher takes logits once more, and keeps none."""
    told = []

    def telling_room(*_, slope_bytes, **__):
        told.append(slope_bytes)
        return nullcontext()

    one = trainer(make_model(), divergence, offload="moments")
    monkeypatch.setattr(one.blocks, "telling_room", telling_room)
    one.step(teach(make_batch(), top_k=1 if divergence == "sampled" else 5))
    assert len(told) == 1 and (told[0] > 0) is (divergence == "sampled")
