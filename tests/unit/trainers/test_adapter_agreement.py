"""In bfloat16 an engine with an adapter computes what the trainer of that adapter does, rounding included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from headrace.models.adapter_bank import AdapterBank
from headrace.models.float_residual import keep_float_residual
from headrace.models.joined_linear import join_linears
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.lora import LoraSpec
from headrace.models.low_rank import serving
from headrace.trainers.adapter_weights import AdapterWeights

IDS = torch.arange(90)[None] % 97


def prepared(directory: Path) -> PreTrainedModel:
    if not directory.exists():
        make_tiny_model(
            directory, family="qwen2", vocab_size=97, hidden_size=64, num_layers=4, context_tokens=128,
            init_std=0.08,
        )  # fmt: skip
    model = load_model(directory).bfloat16()
    assert keep_float_residual(model)
    return model


@torch.no_grad()
def logprobs(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize(
    "targets", [("q_proj",), ("o_proj",), ("gate_proj",), ("down_proj",), ("all-linear",)]
)
def test_rows_without_an_adapter_are_those_of_a_trainer_whose_adapter_is_off(tmp_path, targets):
    spec = LoraSpec(rank=4, alpha=8.0, targets=targets)
    trained = AdapterWeights(prepared(tmp_path / "m").float(), torch.bfloat16, spec)
    served = prepared(tmp_path / "m")
    AdapterBank(served, spec, 1)
    with trained.off():
        assert torch.equal(logprobs(trained.policy), logprobs(served))


@pytest.mark.parametrize("targets", [("o_proj",), ("down_proj",)])
def test_what_an_adapter_adds_to_the_running_sum_is_not_rounded_with_it(tmp_path, targets):
    spec = LoraSpec(rank=4, alpha=8.0, targets=targets)
    trained = AdapterWeights(prepared(tmp_path / "m").float(), torch.bfloat16, spec)
    with torch.no_grad():
        for number, (name, tensor) in enumerate(trained._live.items()):
            if "lora_B" in name:
                noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
                tensor.copy_(0.02 * noise)
    served = prepared(tmp_path / "m")
    before = logprobs(served)
    join_linears(served)
    bank = AdapterBank(served, spec, 1)
    bank.load(1, trained.blobs())
    with serving(bank.rows(torch.ones(IDS.shape[1], dtype=torch.int64))):
        found = logprobs(served)
    assert (found - before).abs().mean() > 1e-3
    torch.testing.assert_close(found, logprobs(trained.policy), rtol=0, atol=1e-4)
