"""Decoders from a directory, and small random ones for tests, the demo and the doctor.

In: a path (or hub name already in the local cache). Out: a causal language model in eval mode on the
asked device and dtype. A model that cannot be loaded is a ModelError that says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from headrace.errors import ModelError
from headrace.models.routers import use_float_routers

Family = Literal["llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3_moe", "olmoe", "deepseek_v3"]

ADAPTER_CONFIG = "adapter_config.json"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MODEL_TYPES = {"gemma3": "gemma3_text"}
_MIXED_WINDOWS = ("gemma2", "gemma3")


def load_model(path: str | Path, *, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """The causal language model saved under ``path``, in eval mode; an adapter is merged into its model."""
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}; choose one of these.")
    directory = Path(path)
    if not directory.exists() and (directory.is_absolute() or str(path).startswith(".")):
        raise ModelError(f"model {str(path)!r} does not exist; point at a saved Hugging Face model.")
    if (directory / ADAPTER_CONFIG).is_file():
        return _merged(directory, dtype=dtype, device=device)
    if directory.is_dir() and not (directory / "config.json").is_file():
        raise ModelError(f"model {str(path)!r} has no config.json; point at a saved Hugging Face model.")
    try:
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=_DTYPES[dtype])
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model {str(path)!r} cannot be loaded ({reason}); give a directory written by save_pretrained."
        ) from error
    use_float_routers(model)
    return model.to(device).eval()


def load_config(path: str | Path) -> PretrainedConfig:
    """The configuration of the model saved under ``path``, or of the one an adapter there was trained on."""
    directory = Path(path)
    if (directory / ADAPTER_CONFIG).is_file():
        return load_config(_base_of(directory))
    if not directory.exists() and (directory.is_absolute() or str(path).startswith(".")):
        raise ModelError(f"model {str(path)!r} does not exist; point at a saved Hugging Face model.")
    try:
        return AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"model {str(path)!r} has no configuration that can be read ({reason}); give a directory written by "
            "save_pretrained, or a hub name."
        ) from error


def _base_of(directory: Path) -> str:
    base = json.loads((directory / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
    if not base:
        raise ModelError(
            f"adapter {str(directory)!r} does not name its model; write base_model_name_or_path into {ADAPTER_CONFIG}."
        )
    return str(base)


def _merged(directory: Path, *, dtype: str, device: str) -> PreTrainedModel:
    """The model an adapter was trained on, with the adapter in its weights."""
    base = _base_of(directory)
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ModelError(
            f"model {str(directory)!r} is an adapter, and peft cannot be imported ({error}); install Headrace's "
            "extra lora."
        ) from error
    model = PeftModel.from_pretrained(load_model(base, dtype=dtype, device=device), str(directory))
    merged: PreTrainedModel = model.merge_and_unload()
    return merged.eval()


def hollow_model(path: str | Path, *, dtype: str = "float32") -> PreTrainedModel:
    """A model of the shape saved under ``path`` (of an adapter: the model it is merged into) whose weights are never
    read or written here: memory that nobody touches is never taken."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = AutoModelForCausalLM.from_config(load_config(path), dtype=_DTYPES[dtype])
    model.tie_weights()  # a part of the initialisation that was left out
    use_float_routers(model)
    return model.eval()


def make_tiny_model(
    directory: str | Path,
    *,
    family: Family = "llama",
    vocab_size: int,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    intermediate_size: int | None = None,
    context_tokens: int = 2048,
    sliding_window: int = 32,
    softcap: float = 50.0,
    num_experts: int = 4,
    experts_per_token: int = 2,
    init_std: float = 0.02,
    tie_embeddings: bool = True,
    seed: int = 0,
) -> PreTrainedModel:
    """Write a randomly initialised small checkpoint and return the same model.

    ``sliding_window`` and ``softcap`` matter to the Gemma families only, whose layers alternate between
    windowed and full attention; ``num_experts`` and ``experts_per_token`` to mixtures of experts."""
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or num_heads,
        "head_dim": hidden_size // num_heads,
        "intermediate_size": intermediate_size or 4 * hidden_size,
        "max_position_embeddings": context_tokens,
        "initializer_range": init_std,
        "tie_word_embeddings": tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    settings |= _family_settings(
        family, num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads, window=sliding_window,
        softcap=softcap, num_experts=num_experts, experts_per_token=experts_per_token,
    )  # fmt: skip
    config = AutoConfig.for_model(_MODEL_TYPES.get(family, family), **settings)
    model = _build(config, seed)
    model.save_pretrained(str(directory))
    return model


def _family_settings(
    family: Family,
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    window: int,
    softcap: float,
    num_experts: int,
    experts_per_token: int,
) -> Mapping[str, Any]:
    chosen = {"num_experts_per_tok": experts_per_token}
    if family in _MIXED_WINDOWS:
        kinds = ("sliding_attention", "full_attention")
        settings: dict[str, Any] = {
            "sliding_window": window,
            "layer_types": [kinds[i % 2] for i in range(num_layers)],
            "query_pre_attn_scalar": hidden_size // num_heads,
        }
        if family == "gemma2":
            settings |= {"attn_logit_softcapping": softcap, "final_logit_softcapping": softcap}
        return settings
    if family == "qwen3_moe":
        return chosen | {"num_experts": num_experts, "moe_intermediate_size": hidden_size * 2}
    if family == "olmoe":
        return chosen | {"num_experts": num_experts}
    if family == "deepseek_v3":
        return _latent_attention(hidden_size, hidden_size // num_heads) | {
            **chosen,
            "n_routed_experts": num_experts,
            "moe_intermediate_size": hidden_size * 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        }
    return {}


def _latent_attention(hidden_size: int, head_dim: int) -> dict[str, Any]:
    return {
        "head_dim": head_dim,
        "q_lora_rank": hidden_size // 2,
        "kv_lora_rank": hidden_size // 2,
        "qk_rope_head_dim": head_dim,
        "qk_nope_head_dim": head_dim,
        "v_head_dim": head_dim,
    }


def _build(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()
