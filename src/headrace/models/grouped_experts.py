"""The experts of a layer computed expert by expert, with room for something beside each of their products.

In: a module whose experts transformers keeps fused (``gate_up_proj`` and ``down_proj``, one slice for each expert), and
what it is called with. Out: what its own forward gives, plus what was put beside the products. Trainer and engine
both compute experts with adapters here, so that they add the same terms in the same places.

Shape legend: T tokens, K experts a token, P = T * K pairs of token and expert, sorted by expert, E experts,
H hidden size, I inputs and O outputs of a product.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers.integrations.moe import _grouped_mm

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")

COLUMNS = 8
"""Products of groups want rows of a multiple of 16 bytes."""


class Pairs(NamedTuple):
    """Which rows of a product are whose."""

    ends_E: torch.Tensor
    """int32: where the rows of each expert end."""
    tokens_P: torch.Tensor


class Beside(Protocol):
    def __call__(self, x_PI: torch.Tensor, product_PO: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        """The product to use."""


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the modules that ``compute_experts`` can stand in for."""
    return {name: module for name, module in model.named_modules() if _is_fused(module)}


def _is_fused(module: nn.Module) -> bool:
    weights = [module._parameters.get(name) for name in EXPERT_WEIGHTS]
    facts = vars(module)
    others = ("has_bias", "is_transposed", "has_post_expert_norm")
    return (
        all(weight is not None and weight.ndim == 3 for weight in weights)
        and bool(facts.get("has_gate"))
        and not any(facts.get(other) for other in others)
    )


def compute_experts(
    experts: Any,
    hidden_TH: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    gate_up: Beside | None,
    down: Beside | None,
) -> torch.Tensor:
    """The forward of a module of ``fused_experts``; None: nothing beside that product."""
    num_experts = experts.gate_up_proj.shape[0]
    expert_P, order_P = experts_TK.reshape(-1).sort()
    every_E = torch.arange(num_experts, device=expert_P.device)
    pairs = Pairs(
        torch.searchsorted(expert_P, every_E, right=True, out_int32=True), order_P // experts_TK.shape[1]
    )
    inner_PI = experts._apply_gate(_product(hidden_TH[pairs.tokens_P], experts.gate_up_proj, pairs, gate_up))
    out_PH = _product(inner_PI, experts.down_proj, pairs, down) * weights_TK.reshape(-1)[order_P, None]
    out_TKH = out_PH[order_P.argsort()].view(*experts_TK.shape, -1)
    return out_TKH.sum(1).to(hidden_TH.dtype)


def grouped_linear(x_PI: torch.Tensor, weight_EOI: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Each row times the weight of its expert."""
    product_PO: torch.Tensor = _grouped_mm(x_PI, weight_EOI.transpose(-2, -1), pairs.ends_E)
    return product_PO


def _product(
    x_PI: torch.Tensor, weight_EOI: torch.Tensor, pairs: Pairs, beside: Beside | None
) -> torch.Tensor:
    product_PO = grouped_linear(x_PI, weight_EOI, pairs)
    return product_PO if beside is None else beside(x_PI, product_PO, pairs)
