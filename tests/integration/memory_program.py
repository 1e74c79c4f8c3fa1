"""Trains a model of a given configuration in this process and prints by how much its resident memory grew.

In: a directory with a configuration, tokens of a row. Out: one number of bytes, the peak over everything since a
tiny model went the same way, which brings in what libraries load when they are first used.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.models.loading import make_tiny_model
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import NO_KV, Sample, TrainBatch

SEQUENCE_TOKENS = 256


def train(model: torch.nn.Module, row_tokens: int) -> None:
    trainer = TorchTrainer(model, sender=None, ledger=TimeLedger(TRAINER_ACTIVITIES), row_tokens=row_tokens)
    for step in (1, 2):
        # Two rows: from the second on there are gradients beside the activations.
        samples = tuple(sample(attempt) for attempt in range(2 * row_tokens // SEQUENCE_TOKENS))
        trainer.step(TrainBatch(step=step, version=step - 1, samples=samples))


def sample(attempt: int) -> Sample:
    loss_mask = np.arange(SEQUENCE_TOKENS) > 0
    return Sample(
        group=0,
        attempt=attempt,
        token_ids=np.full(SEQUENCE_TOKENS, attempt % 7, dtype=np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=np.where(loss_mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(loss_mask, 0, -1).astype(np.int32),
        advantages=np.where(loss_mask, 1.0, 0.0).astype(np.float32),
        temperature=1.0,
        kv_versions=NO_KV,
    )


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main(directory: Path, row_tokens: int) -> None:
    train(make_tiny_model(directory / "tiny", vocab_size=64), SEQUENCE_TOKENS)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident("VmRSS")
    train(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)), row_tokens)
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
