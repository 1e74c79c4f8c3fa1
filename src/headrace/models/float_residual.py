"""The sums that run through the layers, kept in float32 whatever the model is computed in.

In: a decoder whose layers normalise what they read and add what they made (Llama, Qwen, Gemma, OLMoE and their kin).
Out: the same model, whose running sum is float32, with it what attention and dense layers add to it, and whose norms
hand the matrix products their own dtype; gated layers round their inner values once (``gated_layer``). Rounding
the sum to bfloat16 after every layer would be the largest part of what separates engine and trainer: each of the two
rounds another sum, and layer by layer the difference grows. Other models, and float32 ones, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.models.gated_layer import gated_forward, is_gated
from headrace.models.wide_product import make_wide

_ADDED = ("self_attn.o_proj", "mlp.down_proj")
"""The last products of attention and of a dense layer."""


def keep_float_residual(model: PreTrainedModel) -> bool:
    """Change the model for good; False for one that is not built so. A second call changes nothing."""
    layers, last_norm = _layers_and_last_norm(model)
    if last_norm is None or not all(_reads_through_a_norm(layer) for layer in layers):
        return False
    if "forward" in vars(last_norm):
        return True
    layers[0].register_forward_pre_hook(_widen)
    for layer in layers:
        for child in layer.children():
            if _is_norm(child):
                _give_forward(child, _narrow_forward)
        _widen_products(layer)
        mlp = getattr(layer, "mlp", None)
        if mlp is not None and is_gated(mlp):
            _give_forward(mlp, gated_forward)
    _give_forward(last_norm, _narrow_forward)
    return True


def residual_dtype(model: PreTrainedModel) -> torch.dtype:
    """Of what runs from layer to layer."""
    _, last_norm = _layers_and_last_norm(model)
    widened = last_norm is not None and "forward" in vars(last_norm)
    return torch.float32 if widened else model.dtype


def _layers_and_last_norm(model: PreTrainedModel) -> tuple[list[nn.Module], nn.Module | None]:
    decoder = model.get_decoder()
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers) or norm is None or not _is_norm(norm):
        return [], None
    return list(layers), norm


def _reads_through_a_norm(layer: nn.Module) -> bool:
    """Whether attention and feed-forward get their input from a norm we know: then no product meets the running sum."""
    children = dict(layer.named_children())
    before_feed_forward = {"post_attention_layernorm", "pre_feedforward_layernorm"} & children.keys()
    norms = {"input_layernorm", "post_feedforward_layernorm"} | before_feed_forward
    return (
        "input_layernorm" in children
        and bool(before_feed_forward)
        and children.keys() <= {"self_attn", "mlp"} | norms
        and all(_is_norm(children[name]) for name in norms & children.keys())
    )


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and "weight" in module._parameters


def _widen(_layer: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (given[0].float(), *given[1:])


def _widen_products(layer: nn.Module) -> None:
    for name in _ADDED:
        part, _, last = name.partition(".")
        linear = getattr(getattr(layer, part, None), last, None)
        if type(linear) is nn.Linear:
            make_wide(linear)


def _give_forward(module: Any, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    module.forward = MethodType(forward, module)


def _narrow_forward(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = type(norm).forward(norm, hidden)
    return made.to(norm.weight.dtype)
