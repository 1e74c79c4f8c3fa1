"""An adapter of a mixture's experts, as peft keeps it and as it is computed.

In: a model in which peft wraps the experts' fused weights. Out: the same model, whose experts compute the adapter's
part beside each product, as an engine does. Peft's own forward adds B @ A to the weights of all experts in every pass:
a copy of all experts and a gradient as large, a sum rounded to the dtype of the weights, and modules changed in the
middle of a forward, which breaks compiled code. Names and files are peft's, the tensors have a slice for each expert.

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


def split_factors(policy: nn.Module, weights: Iterable[str]) -> None:
    """Give every expert a slice of its own in A [E, R, I] and B [E, O, R], as the products take them and as experts
    are divided among ranks; peft has one matrix for all experts."""
    for wrapper in wrappers_of(policy, weights).values():
        for factor in (wrapper.lora_A, wrapper.lora_B):
            linear = factor[_NAME]
            slices = from_matrix(linear.weight.detach(), wrapper.num_experts, is_b=factor is wrapper.lora_B)
            linear.weight = nn.Parameter(slices)


def from_matrix(matrix: torch.Tensor, num_experts: int, *, is_b: bool) -> torch.Tensor:
    """Peft's A [E * R, I] or B [O, R * E], in which experts are interleaved, with a slice for each expert."""
    if not is_b:
        return matrix.view(num_experts, -1, matrix.shape[1])
    return matrix.view(matrix.shape[0], -1, num_experts).permute(2, 0, 1).contiguous()


def to_matrix(slices: torch.Tensor, *, is_b: bool) -> torch.Tensor:
    """The reverse of ``from_matrix``."""
    return slices.permute(1, 2, 0).flatten(1) if is_b else slices.flatten(0, 1)


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
        a_ERI, b_EOR = self._wrapper.lora_A[_NAME].weight, self._wrapper.lora_B[_NAME].weight
        missing = -a_ERI.shape[1] % COLUMNS
        inner_PR = grouped_linear(x_PI, nn.functional.pad(a_ERI, (0, 0, 0, missing)), pairs)
        part_PO = grouped_linear(inner_PR, nn.functional.pad(b_EOR, (0, missing)), pairs)
        return product_PO + part_PO * self._wrapper.scaling[_NAME]
