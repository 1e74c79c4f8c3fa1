"""Gated layers whose two first products are not rounded before they meet.

In: a bfloat16 model whose running sum is float32 (``float_residual``). Out: the same model, whose layers of the usual
form, down(silu(gate(x)) * up(x)), compute gate and up as one product and hand on what is made of it, rounded once. Of
what separates engine and trainer, the roundings of these two products are the largest part that need not be. And
products that are met in the registers of their kernel are not read from memory again: it is the quicker way, too.

Layers of another form, with biases, or in a model that is not bfloat16, stay as they are.

Shape legend: T rows, I inputs, W inner width, O = 2 W.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from headrace.models.float_residual import residual_dtype
from headrace.models.joined_linear import GATE_UP, JoinedLinear, join_linears
from headrace.models.joined_product import check_memory

_PARTS = {*GATE_UP, "down_proj", "act_fn"}
_PROBE_ROWS = 8
_TOLERANCE = 0.03
"""Relative, of a layer in bfloat16: rounding makes a tenth of it, another form of layer far more."""


def fuse_gated_layers(model: PreTrainedModel) -> int:
    """Change the layers that are of the usual form, for good; returns how many. Their gate and up are joined then."""
    if model.dtype != torch.bfloat16 or residual_dtype(model) != torch.float32:
        return 0
    fused = [layer for layer in model.modules() if _is_usual(layer)]
    for layer in fused:
        join_linears(layer, (GATE_UP,))
        layer.forward = MethodType(_forward, layer)
    return len(fused)


@torch.no_grad()
def _is_usual(layer: Any) -> bool:
    if "forward" in vars(layer) or {name for name, _ in layer.named_children()} != _PARTS:
        return False
    first, second, last = layer.gate_proj, layer.up_proj, layer.down_proj
    kinds = (type(first), type(second))
    if kinds not in ((nn.Linear, nn.Linear), (JoinedLinear, JoinedLinear)) or type(last) is not nn.Linear:
        return False
    if any(part.bias is not None for part in (first, second, last)):
        return False
    x = torch.randn((_PROBE_ROWS, last.out_features), generator=torch.Generator().manual_seed(0))
    x = x.to(last.weight)
    if (
        first.weight.shape != (last.in_features, last.out_features)
        or second.weight.shape != first.weight.shape
    ):
        return False
    made = F.silu(F.linear(x, first.weight).float()) * F.linear(x, second.weight).float()
    wanted = F.linear(made, last.weight.float())
    found = layer(x).float()
    return bool((found - wanted).norm() <= _TOLERANCE * wanted.norm())


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    whole_OI, _ = layer.gate_proj.joined
    weights = (layer.gate_proj.weight, layer.up_proj.weight)
    x_TI = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, layer.down_proj.weight)):
        out, _ = torch.ops.headrace.gated_layer(x_TI, whole_OI, weights, layer.down_proj.weight)
        return out.view(*x.shape[:-1], -1)
    inner_TW = torch.ops.headrace.gated_product(x_TI, whole_OI)
    return layer.down_proj(inner_TW.view(*x.shape[:-1], -1))


def _product(x_TI: torch.Tensor, whole_OI: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, W], and with ``keep`` [T, O], otherwise anything."""
    if x_TI.is_cuda:
        from headrace.kernels.gated import gated_product

        inner_TW, products_TO = gated_product(x_TI.contiguous(), whole_OI, keep=keep)
        return inner_TW, inner_TW if products_TO is None else products_TO
    wide_TO = F.linear(x_TI.float(), whole_OI.float())
    gate_TW, up_TW = wide_TO.chunk(2, -1)
    return (F.silu(gate_TW) * up_TW).to(x_TI.dtype), wide_TO.to(x_TI.dtype)


@torch.library.custom_op("headrace::gated_product", mutates_args=())
def _gated_product(x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return _product(x, whole, False)[0]


@_gated_product.register_fake
def _(x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], whole.shape[0] // 2))


@torch.library.custom_op("headrace::gated_layer", mutates_args=())
def _gated_layer(
    x: torch.Tensor, whole: torch.Tensor, weights: Sequence[torch.Tensor], down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the layer adds to the running sum, in float32, and both products, rounded, for the backward. ``whole`` is a
    constant to autograd; ``weights``, whose memory it is, name where gradients go."""
    check_memory(whole, weights)
    inner_TW, products_TO = _product(x, whole, True)
    if x.is_cuda:
        return torch.mm(inner_TW, down.t(), out_dtype=torch.float32), products_TO
    return F.linear(inner_TW.float(), down.float()), products_TO


@_gated_layer.register_fake
def _(
    x: torch.Tensor, whole: torch.Tensor, _weights: Any, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = x.shape[0]
    return x.new_empty((num_rows, down.shape[0]), dtype=torch.float32), x.new_empty(
        (num_rows, whole.shape[0])
    )


@torch.library.custom_op("headrace::gate_gradients", mutates_args=())
def _gate_gradients(grad: torch.Tensor, products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of both products, and what was made of them once more."""
    if grad.is_cuda:
        from headrace.kernels.gated import gate_gradients

        return gate_gradients(grad.contiguous(), products)
    (gate_TW, up_TW), grad_TW = products.float().chunk(2, -1), grad.float()
    sigmoid_TW = gate_TW.sigmoid()
    silu_TW = gate_TW * sigmoid_TW
    of_gate_TW = grad_TW * up_TW * (sigmoid_TW + silu_TW * (1.0 - sigmoid_TW))
    grads_TO = torch.cat((of_gate_TW, grad_TW * silu_TW), -1)
    return grads_TO.to(grad.dtype), (silu_TW * up_TW).to(grad.dtype)


@_gate_gradients.register_fake
def _(grad: torch.Tensor, products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(products), torch.empty_like(grad)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, whole, weights, down = inputs
    ctx.save_for_backward(x, whole, down, output[1])
    ctx.sizes = [weight.shape[0] for weight in weights]


def _backward(ctx: Any, grad_TI: torch.Tensor, _products: Any) -> tuple[Any, ...]:
    x_TI, whole_OI, down_IW, products_TO = ctx.saved_tensors
    of_x, _, of_weights, of_down = ctx.needs_input_grad
    narrow_TI = grad_TI.to(x_TI.dtype)
    grads_TO, inner_TW = torch.ops.headrace.gate_gradients(narrow_TI @ down_IW, products_TO)
    of_parts: list[torch.Tensor | None] = [None for _ in of_weights]
    if any(of_weights):
        parts = (grads_TO.t() @ x_TI).split(ctx.sizes)
        of_parts = [part if want else None for part, want in zip(parts, of_weights, strict=True)]
    return (
        grads_TO @ whole_OI if of_x else None,
        None,
        of_parts,
        narrow_TI.t() @ inner_TW if of_down else None,
    )


_gated_layer.register_autograd(_backward, setup_context=_keep_for_backward)
