"""Gated layers whose two first products are not rounded before they meet.

In: a layer of the usual form, down(silu(gate(x)) * up(x)), and its input in bfloat16. Out: what it adds to the running
sum, in float32 (``float_residual`` gives layers this forward). What is made of gate and up is rounded once. Of what
separates engine and trainer, the roundings of these two products were the largest part that need not be. And products
that meet in the registers of their kernel are not read from memory again; on a CPU it is the slower way.

A layer in another dtype, or whose parts an adapter has changed, computes as its own class does.

Shape legend: T rows, I inputs, W inner width, O = 2 W.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from headrace.kernels.chip import has_kernels
from headrace.models.joined_linear import GATE_UP, JoinedLinear, join_linears
from headrace.models.joined_product import check_memory
from headrace.models.told import Told, how
from headrace.models.wide_product import float_product, is_wide

_PARTS = {*GATE_UP, "down_proj", "act_fn"}
_SILU = (nn.SiLU, type(ACT2FN["silu"]))


def is_gated(layer: Any) -> bool:
    """Whether it is of the usual form, and nothing else besides; its last product may be wide already."""
    if {name for name, _ in layer.named_children()} != _PARTS or "forward" in vars(layer):
        return False
    linears = (layer.gate_proj, layer.up_proj, layer.down_proj)
    return (
        type(layer.act_fn) in _SILU
        and not dict(layer.named_parameters(recurse=False))
        and all(type(linear) is nn.Linear and linear.bias is None for linear in linears)
        and all(is_untouched(part) for part in layer.children())
        and len(inspect.signature(type(layer).forward).parameters) == 2
        and how(layer, _PARTS, Told("x")) == "down_proj(act_fn(gate_proj(x)) * up_proj(x))"
    )


def is_computed_gated(layer: nn.Module) -> bool:
    """Whether ``gated_forward`` computes the layer as it is now, and not its own class."""
    return has_gated_forward(layer) and _weights(layer) is not None


def has_gated_forward(layer: nn.Module) -> bool:
    return getattr(vars(layer).get("forward"), "__func__", None) is gated_forward


def join_gates(model: nn.Module) -> None:
    """Join gate and up of layers that have ``gated_forward``, for good: gradients of their input are one product then,
    and so are those of their weights."""
    for layer in model.modules():
        if has_gated_forward(layer):
            join_linears(layer, (GATE_UP,))


def gated_values(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    """[T, W], what ``gated_forward`` hands to the last product of a layer that has it; without gradients. None: the
    layer's own class computes it as it is now."""
    weights = _weights(layer)
    if weights is None:
        return None
    gate, up, _, whole = weights
    values: torch.Tensor = torch.ops.headrace.gated_product(x.reshape(-1, x.shape[-1]), gate, up, whole)
    return values


def gated_forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward of a layer that ``is_gated``; float32 of a bfloat16 one."""
    weights = _weights(layer)
    if weights is None:
        own: torch.Tensor = type(layer).forward(layer, x)
        return own
    gate, up, down, whole = weights
    x_TI = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, gate, up, down)):
        out_TI, _ = torch.ops.headrace.gated_layer(x_TI, gate, up, down, whole)
    else:
        out_TI = layer.down_proj(torch.ops.headrace.gated_product(x_TI, gate, up, whole))
    return out_TI.view(*x.shape[:-1], down.shape[0])


def _weights(
    layer: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Of gate, up and down, and of the first two in one, where they are joined; None: they are not all there is."""
    gate, up, down = layer.gate_proj, layer.up_proj, layer.down_proj
    whole = None
    if type(gate) is JoinedLinear:
        whole, _ = gate.joined
        if gate.beside is not None:
            return None
    elif type(gate) is not nn.Linear or type(up) is not nn.Linear:
        return None
    if type(down) is not nn.Linear or gate.weight.dtype != torch.bfloat16:
        return None
    return gate.weight, up.weight, down.weight, whole


def is_untouched(part: nn.Module) -> bool:
    """Whether it computes what its class does, if perhaps wide."""
    return not is_hooked(part) and ("forward" not in vars(part) or is_wide(part))


def is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _product(
    x_TI: torch.Tensor, gate_WI: torch.Tensor, up_WI: torch.Tensor, whole_OI: torch.Tensor | None, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[T, W], and with ``keep`` both products in pairs, [T, O]."""
    if whole_OI is not None:
        check_memory(whole_OI, (gate_WI, up_WI))
    if has_kernels(x_TI.device):
        from headrace.kernels.gated import GatedWeights, gated_product

        return gated_product(x_TI.contiguous(), GatedWeights(gate_WI, up_WI, whole_OI), keep=keep)
    gate_TW, up_TW = (float_product(x_TI, weight) for weight in (gate_WI, up_WI))
    inner_TW = (F.silu(gate_TW) * up_TW).to(x_TI.dtype)
    return inner_TW, torch.stack((gate_TW, up_TW), -1).flatten(-2).to(x_TI.dtype) if keep else None


@torch.library.custom_op("headrace::gated_product", mutates_args=())
def _gated_product(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, whole: torch.Tensor | None
) -> torch.Tensor:
    return _product(x, gate, up, whole, False)[0]


@_gated_product.register_fake
def _(x: torch.Tensor, gate: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], gate.shape[0]))


@torch.library.custom_op("headrace::gated_layer", mutates_args=())
def _gated_layer(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, whole: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the layer adds to the running sum, in float32, and both products, rounded, for the backward. ``whole`` is a
    constant to autograd."""
    inner_TW, products_TO = _product(x, gate, up, whole, True)
    assert products_TO is not None
    return float_product(inner_TW, down), products_TO


@_gated_layer.register_fake
def _(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, whole: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0]
    return x.new_empty((rows, down.shape[0]), dtype=torch.float32), x.new_empty((rows, 2 * gate.shape[0]))


@torch.library.custom_op("headrace::gate_gradients", mutates_args=())
def _gate_gradients(
    grad: torch.Tensor, down: torch.Tensor, products: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of both products, all of the gate's before all of the others, and what was made of them once more; ``grad`` is
    that of what the layer adds, in the weights' dtype."""
    if has_kernels(grad.device):
        from headrace.kernels.gated import product_gradients

        return product_gradients(grad.contiguous(), down, products)
    (gate_TW, up_TW), grad_TW = products.float().unflatten(-1, (-1, 2)).unbind(-1), (grad @ down).float()
    sigmoid_TW = gate_TW.sigmoid()
    silu_TW = gate_TW * sigmoid_TW
    of_gate_TW = grad_TW * up_TW * (sigmoid_TW + silu_TW * (1.0 - sigmoid_TW))
    grads_TO = torch.cat((of_gate_TW, grad_TW * silu_TW), -1)
    return grads_TO.to(grad.dtype), (silu_TW * up_TW).to(grad.dtype)


@_gate_gradients.register_fake
def _(grad: torch.Tensor, down: torch.Tensor, products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(products), grad.new_empty((grad.shape[0], down.shape[1]))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    # The products' gradient is none, and need not be made of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad_TI: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
    x_TI, gate_WI, up_WI, down_IW, whole_OI, products_TO = ctx.saved_tensors
    of_x, of_gate, of_up, of_down, _ = ctx.needs_input_grad
    width = gate_WI.shape[0]
    narrow_TI = grad_TI.to(x_TI.dtype)
    grads_TO, inner_TW = torch.ops.headrace.gate_gradients(narrow_TI, down_IW, products_TO)
    parts = grads_TO.split(width, -1)
    grad_x = grad_gate = grad_up = None
    if of_x:
        apart = whole_OI is None
        grad_x = torch.addmm(parts[0] @ gate_WI, parts[1], up_WI) if apart else grads_TO @ whole_OI
    if of_gate and of_up and whole_OI is not None:
        grad_gate, grad_up = (grads_TO.t() @ x_TI).split(width)
    else:
        grad_gate, grad_up = (
            part.t() @ x_TI if wanted else None for part, wanted in zip(parts, (of_gate, of_up), strict=True)
        )
    return grad_x, grad_gate, grad_up, narrow_TI.t() @ inner_TW if of_down else None, None


_gated_layer.register_autograd(_backward, setup_context=_keep_for_backward)
