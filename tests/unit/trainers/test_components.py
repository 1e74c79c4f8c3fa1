"""The loss of a step with branches is the ordinary groups' own plus the weighted loss of the branches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.torch_trainer import TorchTrainer

WEIGHT = 0.25


def gradients(trainer, batch):
    for rows in trainer.prepare(batch):
        trainer.accumulate(rows, before_update=True)
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_gradients_of_components_add_up(make_model, make_batch, sender, aggregation):
    def build():
        return TorchTrainer(
            make_model(), sender=sender, ledger=TimeLedger(TRAINER_ACTIVITIES), aggregation=aggregation,
            max_tokens=16, row_tokens=24, pivot_weight=WEIGHT,
        )  # fmt: skip

    batch = make_batch(1, num_samples=9)
    main, branches = batch.samples[:4], [replace(s, component="pivot") for s in batch.samples[4:]]
    both = gradients(build(), replace(batch, samples=(*main, *branches)))
    of_main = gradients(build(), replace(batch, samples=main))
    as_main = tuple(replace(s, component="main") for s in branches)
    of_branches = gradients(build(), replace(batch, samples=as_main))
    for name, gradient in both.items():
        torch.testing.assert_close(
            gradient, of_main[name] + WEIGHT * of_branches[name], rtol=1e-4, atol=1e-6, msg=name
        )
