"""Model shapes by name, published ones but for a small mixture of experts and one small enough for a CPU, with random
weights made where they are used.

In: a name, a device, a dtype. Out: a causal language model in eval mode; nothing is downloaded, and nothing
passes through host memory. Speed does not depend on the values of weights, only on their being ordinary
numbers, so the usual initialisation is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from headrace.errors import ConfigError
from headrace.models.routers import use_float_routers

_COMMON: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-0.2b": {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 4096,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    },
    "qwen2-0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2-1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2-7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "moe-small": {
        # 2.7B weights, 0.7B of them used for a token: OLMoE's experts in Qwen3's layers.
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}


def create_random_model(
    shape: str,
    *,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> PreTrainedModel:
    """The named shape with random weights, made on ``device``; the same seed there gives the same weights."""
    return build_random_model(shape_config(shape), device=device, dtype=dtype, seed=seed)


def shape_config(shape: str) -> PretrainedConfig:
    if shape not in SHAPES:
        raise ConfigError(f"model shape {shape!r} is unknown: use one of {', '.join(SHAPES)}")
    settings = _COMMON | SHAPES[shape]
    rope_theta, model_type = settings.pop("rope_theta"), settings.pop("model_type", "qwen2")
    rope = {"rope_type": "default", "rope_theta": rope_theta}
    return AutoConfig.for_model(model_type, **settings, rope_parameters=rope)


def build_random_model(
    config: PretrainedConfig, *, device: str | torch.device, dtype: torch.dtype, seed: int = 0
) -> PreTrainedModel:
    """Parameters are born on the device, and so are the rotary tables, in float32 whatever ``dtype`` is."""
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    use_float_routers(model)
    return model.eval()
