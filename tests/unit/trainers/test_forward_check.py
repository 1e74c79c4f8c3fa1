from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, PreTrainedModel

from headrace.data.packing import pack
from headrace.errors import ModelError
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.agreement import trainer_logprobs
from headrace.trainers.forward_check import check_forward, probe_sample
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.trainers.torch_trainer import TorchTrainer


def test_a_model_computed_right_passes(make_model: Callable[..., PreTrainedModel]) -> None:
    check_forward(make_model())


def test_a_head_that_scales_its_logits_is_refused_by_name() -> None:
    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.3,
        logit_scale=0.25,
        bos_token_id=None,
        eos_token_id=None,
    )
    with pytest.raises(ModelError, match="CohereForCausalLM"):
        check_forward(CohereForCausalLM(config).eval())


def test_agreement_is_the_plain_forward_at_the_temperature(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    model = make_model()
    ids = np.random.default_rng(0).integers(0, 32, 20).astype(np.int32)
    tokens = torch.from_numpy(ids.astype(np.int64))
    full = (model(input_ids=tokens[None], use_cache=False).logits[0] / 0.6).log_softmax(-1).detach().numpy()
    expected = [0.0, *(full[t - 1, ids[t]] for t in range(1, 20))]
    np.testing.assert_allclose(trainer_logprobs(model, ids, temperature=0.6), expected, atol=1e-5)
    rough = trainer_logprobs(model, ids, temperature=0.6, dtype="bfloat16")
    assert 0 < np.abs(rough - np.array(expected)).max() < 0.2


@pytest.mark.parametrize(("dtype", "compute_dtype"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_agreement_has_the_bits_of_a_training_step(
    make_model: Callable[..., PreTrainedModel],
    sender: Any,
    dtype: str,
    compute_dtype: Literal["fp32", "bf16"],
) -> None:
    ids = np.random.default_rng(0).integers(0, 32, 20).astype(np.int32)
    found = trainer_logprobs(make_model(), ids, temperature=1.0, dtype=dtype)
    trainer = TorchTrainer(
        make_model(), sender=sender, ledger=TimeLedger(TRAINER_ACTIVITIES), compute_dtype=compute_dtype
    )
    (row,) = pack([probe_sample(ids)], row_tokens=20)
    trained, _ = token_logprobs(trainer.policy, row_tensors(row, device="cpu"))
    np.testing.assert_array_equal(found[1:], trained.detach().numpy())
