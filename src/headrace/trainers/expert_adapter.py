"""An adapter of a mixture's experts, as peft keeps it and as it is computed.

In: a model in which peft wraps the experts' fused weights. Out: the same model, whose experts compute the adapter's
part beside each product, as an engine does. Peft's own forward adds B @ A to the weights of all experts in every pass:
a copy of all experts and a gradient as large, a sum rounded to the dtype of the weights, and modules changed in the
middle of a forward, which breaks compiled code. Peft keeps the tensors, their names and files.

Shape legend: T tokens, K experts a token, P pairs of token and expert, E experts, R rank, H hidden size, I inputs and
O outputs of a product.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from headrace.models.grouped_experts import COLUMNS, Pairs, compute_experts, grouped_linear

_NAME = "default"


def wrappers_of(policy: nn.Module, weights: Iterable[str]) -> dict[str, Any]:
    """By the name of the fused weight, peft's wrapper that has its adapter."""
    found = {}
    for name in weights:
        parent, _, own = name.rpartition(".")
        found[name] = _nested(policy.get_submodule(parent))[own]
    return found


def compute_beside(policy: nn.Module, weights: Iterable[str]) -> None:
    """Let these weights' experts compute their adapters beside the products, for good."""
    for parent in {name.rpartition(".")[0] for name in weights}:
        outermost: Any = policy.get_submodule(parent)
        outermost.forward = MethodType(_forward, outermost)


def factors(wrapper: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E, R, I] and B [E, O, R]; peft keeps B's experts interleaved."""
    return by_expert(wrapper.lora_A[_NAME].weight, wrapper.lora_B[_NAME].weight, wrapper.num_experts)


def by_expert(a: torch.Tensor, b: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of peft's two matrices."""
    return a.view(num_experts, -1, a.shape[1]), _by_expert(b, num_experts)


@torch.library.custom_op("headrace::by_expert", mutates_args=())
def _by_expert(b: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[O, R * E], experts interleaved, as [E, O, R]. An operation of its own, since compiled code would leave the
    bytes as they lie and change only the strides, which products of groups do not take."""
    return b.view(b.shape[0], -1, num_experts).permute(2, 0, 1).contiguous()


@_by_expert.register_fake
def _(b: torch.Tensor, num_experts: int) -> torch.Tensor:
    return b.new_empty((num_experts, b.shape[0], b.shape[1] // num_experts))


def _remember_experts(ctx: Any, inputs: tuple[torch.Tensor, int], output: torch.Tensor) -> None:
    ctx.num_experts = inputs[1]


def _interleaved(ctx: Any, grad_EOR: torch.Tensor) -> tuple[torch.Tensor, None]:
    return grad_EOR.permute(1, 2, 0).reshape(grad_EOR.shape[1], -1), None


_by_expert.register_autograd(_interleaved, setup_context=_remember_experts)


def _nested(module: Any) -> dict[str, Any]:
    """Peft wraps each weight of a module once more."""
    wrappers = {}
    while getattr(module, "parameter_name", None) is not None:
        wrappers[module.parameter_name] = module
        module = module.base_layer
    return wrappers


def _forward(
    outermost: Any, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    beside: dict[str, Any] = {}
    if not outermost.disable_adapters:
        beside = {name: _Beside(wrapper) for name, wrapper in _nested(outermost).items()}
    return compute_experts(
        outermost.get_base_layer(),
        hidden_TH,
        experts_TK,
        weights_TK,
        gate_up=beside.get("gate_up_proj"),
        down=beside.get("down_proj"),
    )


class _Beside:
    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def __call__(self, x_PI: torch.Tensor, product_PO: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        a_ERI, b_EOR = factors(self._wrapper)
        missing = -a_ERI.shape[1] % COLUMNS
        inner_PR = grouped_linear(x_PI, nn.functional.pad(a_ERI, (0, 0, 0, missing)), pairs)
        part_PO = grouped_linear(inner_PR, nn.functional.pad(b_EOR, (0, missing)), pairs)
        return product_PO + part_PO * self._wrapper.scaling[_NAME]
