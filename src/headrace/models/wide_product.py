"""A linear layer's product in float32, whatever dtype its operands have.

In: an input and a weight of one dtype. Out: their product as it was summed, not rounded to that dtype; gradients are
computed in the operands' dtype, as for a narrow product. What is added to the running sum of the layers need not be
rounded before it is.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def make_wide(linear: nn.Linear) -> None:
    """Let it compute a wide product from now on."""
    linear.forward = MethodType(_wide_forward, linear)  # type: ignore[method-assign]


def is_wide(linear: nn.Module) -> bool:
    return getattr(vars(linear).get("forward"), "__func__", None) is _wide_forward


def _wide_forward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return wide_product(x, linear.weight, linear.bias)


def wide_product(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """float32 [..., O] of [..., I]."""
    if weight_OI.dtype == torch.float32:
        return F.linear(x, weight_OI, bias_O)
    x_TI = x.reshape(-1, x.shape[-1])
    # Torch has no derivative of it; without one to take, compilers had better see what it is.
    product: torch.Tensor = (
        torch.ops.headrace.wide_product(x_TI, weight_OI)
        if torch.is_grad_enabled()
        else float_product(x_TI, weight_OI)
    )
    product = product if bias_O is None else product + bias_O.float()
    return product.view(*x.shape[:-1], weight_OI.shape[0])


def float_product(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """float32 [T, O]; torch cannot differentiate it."""
    if x_TI.device.type == "cuda":
        return torch.mm(x_TI, weight_OI.t(), out_dtype=torch.float32)
    return F.linear(x_TI.float(), weight_OI.float())


@torch.library.custom_op("headrace::wide_product", mutates_args=())
def _wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return float_product(x, weight)


@_wide_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


def _keep_for_backward(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_TO: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    x_TI, weight_OI = ctx.saved_tensors
    of_input, of_weight = ctx.needs_input_grad
    narrow_TO = grad_TO.to(weight_OI.dtype)
    return narrow_TO @ weight_OI if of_input else None, narrow_TO.t() @ x_TI if of_weight else None


_wide_product.register_autograd(_backward, setup_context=_keep_for_backward)
