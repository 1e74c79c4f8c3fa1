"""Decoder layers with fewer steps in between, for passes of so few rows that a step costs what its launch costs.

In: layers of the usual form: norm, attention, sum, norm, feed-forward, sum. Out: the same layers, whose last products
are added to the running sum where it lies, and whose queries and keys are rotated where attention reads them, unless
norms of their own come before: those a compiler makes one step with the rotation anyway, rounded once. The sum that a
layer is given is the one it returns, so nobody else may hold it. Nothing here has a gradient: it is for engines. A
layer whose own code does anything else stays as it is.

Shape legend: T rows of a pass, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.kernels.chip import has_kernels
from headrace.models.device_attention import LayerOptions
from headrace.models.float_residual import residual_dtype
from headrace.models.gated_layer import gated_values, has_gated_forward, is_hooked, is_untouched
from headrace.models.told import Told, how, of_one
from headrace.models.usual_attention import (
    NORMALISING,
    PLAIN,
    how_it_attends,
    rotates_as_usual,
    rotation_of,
)
from headrace.models.wide_product import float_product

_SUM = "(self_attn(input_layernorm(x)) + x)"
_LAYER = f"({_SUM} + mlp(post_attention_layernorm({_SUM})))"
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class _Parts(NamedTuple):
    """What a layer is known to have."""

    asked: LayerOptions
    """Of its attention."""
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None
    """Its own, for heads that go through norms before; None: they do not, and attention rotates them."""
    is_gated: bool
    """Whether its feed-forward is nothing but a forward of ``gated_layer``."""
    arrived: torch.Tensor | None
    """Counters for products that are split over a GPU; all layers have the same, since passes follow one another."""


def merge_layers(model: PreTrainedModel, options: Sequence[LayerOptions]) -> int:
    """Change layers of the usual form for good; ``options``: what each layer asks of its attention. Returns how many
    were changed."""
    base = model.base_model
    angles = getattr(getattr(base, "rotary_emb", None), "inv_freq", None)
    layers = list(getattr(base, "layers", ()))
    if residual_dtype(model) != torch.float32 or angles is None or len(layers) != len(options):
        return 0
    merged, arrived = 0, _counters(model.device)
    for layer, asked in zip(layers, options, strict=True):
        if is_usual(layer) and 2 * angles.numel() == layer.self_attn.head_dim:
            attention = layer.self_attn
            rotate = rotation_of(attention) if how_it_attends(attention).form == NORMALISING else None
            layer.known_parts = _Parts(asked, rotate, _is_bare_gated(layer.mlp), arrived)
            layer.forward = MethodType(merged_forward, layer)
            merged += 1
    return merged


def is_usual(layer: Any) -> bool:
    """Whether ``merged_forward`` computes what the layer's class does."""
    attention = getattr(layer, "self_attn", None)
    if attention is None or "forward" in vars(layer) or not is_untouched(attention):
        return False
    form = how_it_attends(attention).form
    return (
        how(layer, _LAYER_PARTS, Told("x"), made_by=_part_of_layer) == _LAYER
        and (form == PLAIN or (form == NORMALISING and _norms_are_of_heads(attention)))
        and is_untouched(attention.o_proj)
        and rotates_as_usual(attention)
    )


def merged_forward(
    layer: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_unused: Any,
) -> torch.Tensor:
    """The forward of a layer that ``is_usual``; changes ``hidden_states`` and returns it."""
    x = layer.input_layernorm(hidden_states)
    arrived = layer.known_parts.arrived
    _add_product(hidden_states, layer.self_attn.o_proj, _attended(layer, x, position_embeddings), arrived)
    x = layer.post_attention_layernorm(hidden_states)
    inner = gated_values(layer.mlp, x) if layer.known_parts.is_gated else None
    if inner is None:
        hidden_states.add_(layer.mlp(x))
    else:
        _add_product(hidden_states, layer.mlp.down_proj, inner, arrived)
    return hidden_states


def _attended(layer: Any, x: torch.Tensor, angles: tuple[Any, Any]) -> torch.Tensor:
    attention, asked = layer.self_attn, layer.known_parts.asked
    in_heads = (*x.shape[:-1], -1, attention.head_dim)
    query = attention.q_proj(x).view(in_heads)
    key = attention.k_proj(x).view(in_heads)
    value = attention.v_proj(x).view(in_heads)
    rotate, left = layer.known_parts.rotate, angles
    if rotate is not None:
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if rotate is not None:
        query, key = rotate(query, key, *angles)
        left = (None, None)
    made: torch.Tensor = torch.ops.headrace.paged_attention(
        query, key, value, *left, asked.scale, asked.window or 0, asked.softcap or 0.0
    )
    return made.reshape(*x.shape[:-1], -1)


def _add_product(
    total: torch.Tensor, linear: nn.Module, x: torch.Tensor, arrived: torch.Tensor | None
) -> None:
    if type(linear) is nn.Linear and linear.bias is None:
        torch.ops.headrace.add_product(total, x, linear.weight, arrived)
    else:
        total.add_(linear(x))


@torch.library.custom_op("headrace::add_product", mutates_args=("total",))
def _add_product_in_place(
    total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, arrived: torch.Tensor | None
) -> None:
    """``total`` is float32, and the product is not rounded before it is added. ``arrived`` holds zeros before and
    after, so to a compiler it does not change; what orders two calls is the sum they share."""
    total_TO, x_TI = total.view(-1, total.shape[-1]), x.reshape(-1, x.shape[-1])
    if weight.dtype == torch.float32:
        total_TO.addmm_(x_TI, weight.t())
    elif arrived is not None and _is_quick(total_TO, x_TI, weight):
        from headrace.kernels.added_product import add_product

        add_product(total_TO, x_TI.contiguous(), weight, arrived)
    elif total.is_cuda:
        torch.addmm(total_TO, x_TI, weight.t(), out_dtype=torch.float32, out=total_TO)
    else:
        total_TO.add_(float_product(x_TI, weight))


@_add_product_in_place.register_fake
def _(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, arrived: torch.Tensor | None) -> None:
    return None


def _is_quick(total_TO: torch.Tensor, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    from headrace.kernels.added_product import is_quick

    return total_TO.is_contiguous() and is_quick(x_TI, weight_OI)


def _counters(device: torch.device) -> torch.Tensor | None:
    """Of the kernel that adds products; None: it does not run there."""
    if not has_kernels(device):
        return None
    from headrace.kernels.added_product import MOST_TILES

    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def _part_of_layer(name: str, *given: Told, **named: Any) -> Any:
    if name == "self_attn":
        return of_one(name, named.pop("hidden_states", *given)), None
    return of_one(name, *given, **named)


def _norms_are_of_heads(attention: Any) -> bool:
    weights = [getattr(norm, "weight", None) for norm in (attention.q_norm, attention.k_norm)]
    return all(weight is not None and weight.numel() == attention.head_dim for weight in weights)


def _is_bare_gated(layer: nn.Module) -> bool:
    """Whether its values may be asked for, and its last product added, past the layer itself."""
    return (
        has_gated_forward(layer) and not is_hooked(layer) and is_untouched(layer.get_submodule("down_proj"))
    )
