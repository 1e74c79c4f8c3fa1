"""The product of several linear layers that read one input, with the gradients of each.

In: an input, one matrix of all layers' rows, and the layers' own weights and biases, whose memory is that matrix's.
Out: the products side by side. The matrix itself is no parameter: its gradient is computed whole, and each layer's
weight gets its rows of it. The layers' tensors are not read, they only name where gradients go.

Shape legend: T rows, I inputs, O outputs of all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from headrace.errors import InvariantError


def joined_product(
    x: torch.Tensor,
    whole_OI: torch.Tensor,
    whole_O: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
) -> torch.Tensor:
    """[..., O] of [..., I]; ``weights`` and ``biases`` follow one another in the rows of ``whole_OI`` and ``whole_O``,
    which are constants to autograd."""
    product: torch.Tensor = torch.ops.headrace.joined_product(
        x.reshape(-1, x.shape[-1]), whole_OI, whole_O, weights, biases
    )
    return product.view(*x.shape[:-1], whole_OI.shape[0])


@torch.library.custom_op("headrace::joined_product", mutates_args=())
def _joined_product(
    x: torch.Tensor,
    whole: torch.Tensor,
    whole_bias: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
) -> torch.Tensor:
    check_memory(whole, weights)
    if whole_bias is not None:
        check_memory(whole_bias, biases)
    return F.linear(x, whole, whole_bias)


def check_memory(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """A model that was copied or moved after its layers were joined would go on computing with weights that no
    update reaches."""
    place = whole.data_ptr()
    for part in parts:
        if part.data_ptr() != place:
            raise InvariantError(
                "joined layers no longer share the memory they are computed with: copy or move a model first, then "
                "join its layers"
            )
        place += part.nbytes


@_joined_product.register_fake
def _(x: torch.Tensor, whole: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], whole.shape[0]))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, whole, _, weights, _ = inputs
    ctx.save_for_backward(x, whole)
    ctx.sizes = [weight.shape[0] for weight in weights]


def _backward(ctx: Any, grad_TO: torch.Tensor) -> tuple[Any, ...]:
    x_TI, whole_OI = ctx.saved_tensors
    of_input, _, _, of_weights, of_biases = ctx.needs_input_grad

    def in_parts(wanted: Sequence[bool], whole_gradient: Any) -> list[torch.Tensor | None]:
        if not any(wanted):
            return [None for _ in wanted]
        parts = whole_gradient().split(ctx.sizes)
        return [part if want else None for part, want in zip(parts, wanted, strict=True)]

    return (
        grad_TO @ whole_OI if of_input else None,
        None,
        None,
        in_parts(of_weights, lambda: grad_TO.t() @ x_TI),
        in_parts(of_biases, lambda: grad_TO.sum(0)),
    )


_joined_product.register_autograd(_backward, setup_context=_keep_for_backward)
