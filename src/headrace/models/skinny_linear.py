"""Linear layers with float32 results, computed for few rows by a kernel that reads their weights at full speed.

In: a model whose ``o_proj`` and ``down_proj`` have float32 products (``float_residual``). Out: the same model for
inference, whose passes of few rows compute them by ``kernels.skinny_product`` where the GPU has the shared memory for
it, and others as before. Compiled, a product is one opaque operation that decides by the rows it meets, so that one
piece of code serves any number of them.

The kernel's workspace is one a device: the passes of a process run on one stream.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.models.float_residual import give_forward, widened_linears
from headrace.models.wide_product import plain_wide_product

if TYPE_CHECKING:
    from headrace.kernels.skinny_product import ProductWorkspace

_ALIGNMENT = 8
"""Inputs whose rows begin where 16 bytes can be read at once."""
_workspaces: dict[torch.device, ProductWorkspace] = {}


def use_skinny_products(model: PreTrainedModel) -> int:
    """Change the model for good; returns how many of its products it concerns. They have no gradients any more."""
    linears = [linear for linear in widened_linears(model) if linear.in_features % _ALIGNMENT == 0]
    for linear in linears:
        give_forward(linear, _forward)
    if linears and model.device.type == "cuda" and model.device not in _workspaces:
        # Triton is needed on a GPU only.
        from headrace.kernels.skinny_product import product_workspace, runs_on

        if runs_on(model.device):
            # Made here: what a graph's capture allocates belongs to that graph.
            _workspaces[model.device] = product_workspace(model.device)
    return len(linears)


def _forward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    product = torch.ops.headrace.skinny_product(x.reshape(-1, x.shape[-1]), linear.weight)
    product = product if linear.bias is None else product + linear.bias.float()
    return product.view(*x.shape[:-1], -1)


@torch.library.custom_op("headrace::skinny_product", mutates_args=())
def _skinny_product(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    workspace = _workspaces.get(x_TI.device)
    if workspace is None:
        return plain_wide_product(x_TI, weight_OI)
    from headrace.kernels.skinny_product import skinny_product, usual_tiling

    tiling = usual_tiling(x_TI.shape[0], weight_OI.shape[0])
    if tiling is None:
        return plain_wide_product(x_TI, weight_OI)
    return skinny_product(x_TI.contiguous(), weight_OI, tiling, workspace)


@_skinny_product.register_fake
def _(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    return x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]), dtype=torch.float32)
