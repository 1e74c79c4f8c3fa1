"""Models that would be computed wrongly are refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.engines.checks import check_model
from headrace.errors import ModelError
from headrace.models.loading import make_tiny_model

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "head_dim": 16,
}


def build(kind, **settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **settings)
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_model_within_the_interface_passes(tmp_path):
    facts = check_model(make_tiny_model(tmp_path, vocab_size=40, init_std=0.1), block_size=16)
    assert facts.min_rows >= 4


def test_attention_sinks_are_honoured():
    model = build(
        "gpt_oss",
        **SMALL,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=16,
        initializer_range=0.2,
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(1.0)
    check_model(model, block_size=8)


def test_linear_attention_is_refused_by_name():
    model = build(
        "qwen3_next", **SMALL, layer_types=["linear_attention", "full_attention"], num_experts=2,
        num_experts_per_tok=1, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"Qwen3Next.*linear_attention"):
        check_model(model, block_size=16)


def test_chunked_attention_is_refused_by_name():
    model = build(
        "llama4_text", **SMALL, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=16,
        layer_types=["chunked_attention", "full_attention"],
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"Llama4.*chunked_attention"):
        check_model(model, block_size=16)


def test_a_model_outside_the_interface_is_refused_by_name():
    model = build("bloom", vocab_size=50, hidden_size=32, n_layer=2, n_head=2)
    with pytest.raises(ModelError, match="Bloom"):
        check_model(model, block_size=16)


def test_a_model_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    model = make_tiny_model(
        tmp_path, family="gemma2", vocab_size=40, sliding_window=16, init_std=0.3, tie_embeddings=False
    )
    # The paged path no longer hears of the window, as with an option it would not know.
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn, "sliding_window", None)
    with pytest.raises(ModelError, match="differs from a plain forward"):
        check_model(model, block_size=16)
