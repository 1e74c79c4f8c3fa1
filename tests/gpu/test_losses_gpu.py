"""What an environment answered, and optimal baselines, on a GPU against the same step in float32 on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from headrace.bench.shapes import build_random_model
from headrace.bench.step_workload import StepWorkload
from headrace.bench.train import random_samples
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import Sample, StepResult, TrainBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

CONFIG = Qwen2Config(
    vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.05, tie_word_embeddings=True, max_position_embeddings=2048,
)  # fmt: skip


def answered(sample: Sample) -> Sample:
    """Every third stretch of four tokens after the first sampled one is the environment's."""
    place = np.arange(sample.num_tokens) - int(sample.loss_mask.argmax())
    its = (place >= 4) & (place // 4 % 3 == 1)
    versions = np.where(its, -1, sample.versions).astype(np.int32)
    advantages = np.where(its, 0, sample.advantages).astype(np.float32)
    return replace(sample, loss_mask=sample.loss_mask & ~its, versions=versions, advantages=advantages)


def step(device: str, dtype: str, **settings: object) -> StepResult:
    torch.manual_seed(0)
    model = build_random_model(CONFIG, device="cpu", dtype=torch.float32).to(device)
    workload = StepWorkload(num_groups=4, group_size=4, prompt_tokens=40, completion_tokens=60)
    samples = tuple(map(answered, random_samples(workload, vocab_size=CONFIG.vocab_size)))
    trainer = TorchTrainer(
        model, sender=None, ledger=TimeLedger(TRAINER_ACTIVITIES), compute_dtype=dtype, row_tokens=1024, **settings
    )  # fmt: skip
    return trainer.step(TrainBatch(step=1, version=0, samples=samples))


@pytest.mark.parametrize(("dtype", "close"), [("fp32", 1e-3), ("bf16", 0.05)])
def test_answers_cost_what_they_cost_on_a_cpu(dtype: str, close: float) -> None:
    exact, found = (step(*where, echo_coef=0.1).metrics for where in (("cpu", "fp32"), ("cuda", dtype)))
    assert found["environment_tokens"] == exact["environment_tokens"] > 0
    for name in ("environment_loss", "loss", "grad_norm"):
        assert found[name] == pytest.approx(exact[name], rel=close, abs=close / 10), name


def test_baselines_are_those_of_a_cpu() -> None:
    exact, found = (step(where, "fp32", optimal_baseline=True).metrics for where in ("cpu", "cuda"))
    # Ratios of whole attempts are products of their tokens', squared.
    for name in ("baseline_shift", "grad_norm"):
        assert found[name] == pytest.approx(exact[name], rel=2e-2), name
    assert np.isfinite(step("cuda", "bf16", optimal_baseline=True).metrics["baseline_shift"])
