"""Decoder layers with fewer steps in between, for passes of so few rows that a step costs what its launch costs.

In: layers of the usual form: norm, attention, sum, norm, feed-forward, sum. Out: the same layers, whose last products
are added to the running sum where it lies, and whose queries and keys are rotated where attention reads them;
everything is rounded as before. The sum that a layer is given is the one it returns, so nobody else may hold it.
Nothing here has a gradient: it is for engines. A layer whose own code does anything else stays as it is.

Shape legend: T rows of a pass, I inputs, O outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.kernels.rotation import Rotation, rotated
from headrace.models.device_attention import LayerOptions
from headrace.models.float_residual import residual_dtype
from headrace.models.gated_layer import gated_values, has_gated_forward
from headrace.models.told import Told, how
from headrace.models.wide_product import float_product

_SUM = "(self_attn(input_layernorm(x)) + x)"
_LAYER = f"({_SUM} + mlp(post_attention_layernorm({_SUM})))"
_ATTENTION = "o_proj(attended(turned({query}), turned({key}), v_proj(x)))"
_ATTENTIONS = (
    _ATTENTION.format(query="q_proj(x)", key="k_proj(x)"),
    _ATTENTION.format(query="q_norm(q_proj(x))", key="k_norm(k_proj(x))"),
)
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}


class _Parts(NamedTuple):
    """What a layer is known to have."""

    asked: LayerOptions
    """Of its attention."""
    normalises_heads: bool
    """Whether queries and keys go through norms of their own."""
    is_gated: bool
    """Whether its feed-forward has a forward of ``gated_layer``."""


def merge_layers(model: PreTrainedModel, options: Sequence[LayerOptions]) -> int:
    """Change layers of the usual form for good; ``options``: what each layer asks of its attention. Returns how many
    were changed."""
    base = model.base_model
    angles = getattr(getattr(base, "rotary_emb", None), "inv_freq", None)
    layers = list(getattr(base, "layers", ()))
    if residual_dtype(model) != torch.float32 or angles is None or len(layers) != len(options):
        return 0
    merged = 0
    for layer, asked in zip(layers, options, strict=True):
        if is_usual(layer) and 2 * angles.numel() == layer.self_attn.head_dim:
            normalises_heads = "q_norm" in dict(layer.self_attn.named_children())
            layer.known_parts = _Parts(asked, normalises_heads, has_gated_forward(layer.mlp))
            layer.forward = MethodType(merged_forward, layer)
            merged += 1
    return merged


def is_usual(layer: Any) -> bool:
    """Whether ``merged_forward`` computes what the layer's class does."""
    attention = getattr(layer, "self_attn", None)
    if attention is None or "forward" in vars(layer) | vars(attention) or _is_hooked(attention):
        return False
    norms = [norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None]
    return (
        how(layer, _LAYER_PARTS, Told("x"), made_by=_part_of_layer) == _LAYER
        and _how_it_attends(attention) in _ATTENTIONS
        and all(norm.weight.numel() == attention.head_dim for norm in norms)
        and _rotates_as_usual(attention)
    )


def merged_forward(
    layer: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_unused: Any,
) -> torch.Tensor:
    """The forward of a layer that ``is_usual``; changes ``hidden_states`` and returns it."""
    x = layer.input_layernorm(hidden_states)
    _add_product(hidden_states, layer.self_attn.o_proj, _attended(layer, x, position_embeddings))
    x = layer.post_attention_layernorm(hidden_states)
    inner = gated_values(layer.mlp, x) if layer.known_parts.is_gated else None
    if inner is None:
        hidden_states.add_(layer.mlp(x))
    else:
        _add_product(hidden_states, layer.mlp.down_proj, inner)
    return hidden_states


def _attended(layer: Any, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    attention, asked = layer.self_attn, layer.known_parts.asked
    in_heads = (*x.shape[:-1], -1, attention.head_dim)
    query = attention.q_proj(x).view(in_heads)
    key = attention.k_proj(x).view(in_heads)
    value = attention.v_proj(x).view(in_heads)
    if layer.known_parts.normalises_heads:
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    made: torch.Tensor = torch.ops.headrace.paged_attention(
        query, key, value, *angles, asked.scale, asked.window or 0, asked.softcap or 0.0
    )
    return made.reshape(*x.shape[:-1], -1)


def _add_product(total: torch.Tensor, linear: nn.Module, x: torch.Tensor) -> None:
    if type(linear) is nn.Linear and linear.bias is None:
        torch.ops.headrace.add_product(total, x, linear.weight)
    else:
        total.add_(linear(x))


@torch.library.custom_op("headrace::add_product", mutates_args=("total",))
def _add_product_in_place(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """``total`` is float32, and the product is not rounded before it is added."""
    total_TO, x_TI = total.view(-1, total.shape[-1]), x.reshape(-1, x.shape[-1])
    if weight.dtype == torch.float32:
        total_TO.addmm_(x_TI, weight.t())
    elif total.is_cuda:
        torch.addmm(total_TO, x_TI, weight.t(), out_dtype=torch.float32, out=total_TO)
    else:
        total_TO.add_(float_product(x_TI, weight))


@_add_product_in_place.register_fake
def _(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    return None


def _part_of_layer(name: str, x: Told) -> Any:
    made = Told(f"{name}({x.how})")
    return (made, None) if name == "self_attn" else made


def _how_it_attends(attention: Any) -> str | None:
    def attended(
        _: Any, query: Told, key: Told, value: Told, *_mask: Any, **_options: Any
    ) -> tuple[Told, None]:
        return Told(f"attended({query.how}, {key.how}, {value.how})"), None

    def turned(query: Told, key: Told, _cos: Told, _sin: Told) -> tuple[Told, Told]:
        return Told(f"turned({query.how})"), Told(f"turned({key.how})")

    interface = SimpleNamespace(get_interface=lambda *_: attended)
    return how(
        attention,
        _ATTENTION_PARTS,
        hidden_states=Told("x"),
        position_embeddings=(Told("cos"), Told("sin")),
        attention_mask=None,
        standing_in={"apply_rotary_pos_emb": turned, "ALL_ATTENTION_FUNCTIONS": interface},
    )


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _rotates_as_usual(attention: Any) -> bool:
    """Tried out: families that turn other pairs call it by the same name."""
    rotate = inspect.unwrap(type(attention).forward).__globals__["apply_rotary_pos_emb"]
    generator = torch.Generator().manual_seed(5)
    query, key = torch.randn((2, 1, 3, 4, attention.head_dim), generator=generator)
    cos, sin = torch.randn((2, 1, 4, attention.head_dim), generator=generator)
    for given, made in zip((query, key), rotate(query, key, cos, sin), strict=True):
        expected = rotated(given[0].transpose(0, 1), Rotation(cos[0], sin[0])).transpose(0, 1)
        if made.shape != given.shape or not torch.allclose(made[0], expected, atol=1e-5):
            return False
    return True
