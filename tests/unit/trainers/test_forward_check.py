from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, PreTrainedModel

from headrace.errors import ModelError
from headrace.trainers.agreement import trainer_logprobs
from headrace.trainers.forward_check import check_forward


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
