"""The gradient of the output head arrives exactly once, whichever head computed it and wherever it is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.distilling import Distillation
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import Sample, SamplingMask, TeacherScores, TrainBatch

VOCAB_SIZE = 32
HEADS = ("whole", "cut", "mixed", "teacher")


def kept(sample: Sample, rng: np.random.Generator, *, free_share: float) -> Sample:
    """With kept sets of six ids on some of its loss tokens."""
    rows = []
    for token, is_loss in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        others = rng.permutation(np.delete(np.arange(VOCAB_SIZE), token))[:5]
        is_free = not is_loss or rng.random() < free_share
        rows.append([] if is_free else sorted([token, *others.tolist()]))
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    ids = np.array([i for row in rows for i in row], dtype=np.int32)
    return replace(sample, sampling_mask=SamplingMask(token_ids=ids, offsets=offsets))


def taught(sample: Sample, rng: np.random.Generator) -> Sample:
    top_ids = np.stack([rng.permutation(VOCAB_SIZE)[:4] for _ in range(sample.num_tokens)]).astype(np.int32)
    logprobs = np.log(np.full(top_ids.shape, 0.2, np.float32))
    own = np.full(sample.num_tokens, -2.0, np.float32)
    return replace(sample, teacher=TeacherScores(logprobs=own, top_ids=top_ids, top_logprobs=logprobs))


def with_head(batch: TrainBatch, head: str) -> TrainBatch:
    rng = np.random.default_rng(1)
    change = {
        "whole": lambda s: s,
        "cut": lambda s: kept(s, rng, free_share=0.0),
        "mixed": lambda s: kept(s, rng, free_share=0.5),
        "teacher": lambda s: taught(s, rng),
    }[head]
    return replace(batch, samples=tuple(map(change, batch.samples)))


def plain_logits(model: Any, sample: Sample) -> torch.Tensor:
    """float32 [loss tokens, vocabulary] at the sample's temperature, by an ordinary forward."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / sample.temperature
    return logits[np.flatnonzero(sample.loss_mask) - 1]


def plain_loss(model: Any, batch: TrainBatch, head: str) -> torch.Tensor:
    """Token mean of -ratio * advantage, and of KL(t || pi) with the teacher's entries and the rest."""
    num_tokens = sum(sample.num_loss_tokens for sample in batch.samples)
    total = torch.zeros(())
    for sample in batch.samples:
        mask = sample.loss_mask
        logits = plain_logits(model, sample)
        if sample.sampling_mask is not None:
            outside = torch.zeros(logits.shape, dtype=torch.bool)
            offsets = sample.sampling_mask.offsets
            for row, place in enumerate(np.flatnonzero(mask)):
                ids = sample.sampling_mask.token_ids[offsets[place] : offsets[place + 1]]
                if len(ids):
                    outside[row] = True
                    outside[row, ids.astype(np.int64)] = False
            logits = logits.masked_fill(outside, -torch.inf)
        whole = logits.log_softmax(-1)
        targets = torch.from_numpy(sample.token_ids[mask].astype(np.int64))
        logprobs = whole.gather(1, targets[:, None])[:, 0]
        ratio = (logprobs - torch.from_numpy(sample.behavior_logprobs[mask])).exp()
        total = total - (ratio * torch.from_numpy(sample.advantages[mask])).sum()
        if head == "teacher":
            assert sample.teacher is not None and sample.teacher.top_ids is not None
            policy = whole.gather(1, torch.from_numpy(sample.teacher.top_ids[mask].astype(np.int64)))
            rest = (1 - policy.exp().sum(-1)).log()
            total = total + (0.2 * (np.log(0.2) - policy)).sum() + (0.2 * (np.log(0.2) - rest)).sum()
    return total / num_tokens


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("head", HEADS)
def test_over_two_rows_gradients_are_those_of_a_plain_forward(
    head, dtype, tied, make_model, make_batch, sender
):
    batch = with_head(make_batch(num_samples=6), head)

    def model_that_both_can_hold():
        model = make_model(tied=tied)
        return model.bfloat16().float() if dtype == "bf16" else model

    rounded = model_that_both_can_hold()
    plain_loss(rounded, batch, head).backward()
    expected = {name: p.grad.clone() for name, p in rounded.named_parameters() if p.grad is not None}

    # No clip is ever reached: the ratio itself is the loss.
    trainer = TorchTrainer(
        model_that_both_can_hold(), sender=sender, ledger=TimeLedger(TRAINER_ACTIVITIES), compute_dtype=dtype,
        row_tokens=max(sum(s.num_tokens for s in batch.samples) // 2, 1), loss="ppo", clip_low=0.999, clip_high=1e6,
        share_prefixes=False, guard="off",
        distillation=Distillation(divergence="forward") if head == "teacher" else None,
    )  # fmt: skip
    (rows,) = trainer.prepare(batch)
    assert len(rows) >= 2
    trainer.accumulate(rows, before_update=True)
    assert expected.keys() == {name for name, p in trainer.model.named_parameters() if p.grad is not None}
    for name, parameter in trainer.model.named_parameters():
        close = torch.nn.functional.cosine_similarity(
            parameter.grad.flatten(), expected[name].flatten(), dim=0
        )
        size = float(parameter.grad.norm() / expected[name].norm())
        if dtype == "fp32":
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(
                parameter.grad, expected[name], atol=2e-5 * max(scale, 1), rtol=0, msg=name
            )
        else:
            assert float(close) > 0.98 and 0.93 < size < 1.07, (name, float(close), size)
