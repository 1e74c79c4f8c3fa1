"""What adapters add to the experts of a layer, every row of a pass with one of them or none.

In: the experts' inputs and products. Out: the products with the adapter of each row added. As in ``low_rank``, A
and B of all adapters lie one after the other, here in one matrix for each expert, and between the two products every
column that is not of the row's own adapter becomes zero. Rows are sorted by expert alone, as for the model's own
product, so nothing depends on which adapters a pass meets.

Shape legend: P pairs of token and expert, E experts, C columns (adapters * rank, filled up), I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from headrace.models.grouped_experts import COLUMNS, Pairs, compute_experts, grouped_linear
from headrace.models.low_rank import current_rows


class ExpertLowRank(nn.Module):
    """What all adapters add to one product of all experts. The tensors are no part of the model's state."""

    a: torch.Tensor
    """[E, C, I]."""
    b: torch.Tensor
    """[E, O, C]."""

    def __init__(self, weight_EOI: torch.Tensor, num_columns: int) -> None:
        """``num_columns``: adapters * rank."""
        super().__init__()
        num_experts, num_out, num_in = weight_EOI.shape
        columns = -(-num_columns // COLUMNS) * COLUMNS
        made = weight_EOI.detach()
        self.register_buffer("a", made.new_zeros((num_experts, columns, num_in)), persistent=False)
        self.register_buffer("b", made.new_zeros((num_experts, num_out, columns)), persistent=False)

    def forward(self, x_PI: torch.Tensor, product_PO: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.headrace.expert_low_rank(x_PI, product_PO, self.a, self.b, *pairs)
        return _with_adapters(x_PI, product_PO, self.a, self.b, pairs)


class AdaptedExperts(nn.Module):
    """The experts of a layer; their parameters keep their names."""

    def __init__(self, experts: nn.Module, low_ranks: Mapping[str, ExpertLowRank]) -> None:
        """``low_ranks``: by the name of the weight they are beside."""
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.beside_gate_up, self.beside_down = low_ranks.get("gate_up_proj"), low_ranks.get("down_proj")
        self._apply_gate = experts._apply_gate

    def forward(
        self, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        return compute_experts(
            self, hidden_TH, experts_TK, weights_TK, gate_up=self.beside_gate_up, down=self.beside_down
        )


def _with_adapters(
    x_PI: torch.Tensor, product_PO: torch.Tensor, a: torch.Tensor, b: torch.Tensor, pairs: Pairs
) -> torch.Tensor:
    rows = current_rows()
    if rows is None:
        return product_PO
    scales_TC = nn.functional.pad(rows.scales_TR, (0, a.shape[1] - rows.scales_TR.shape[1]))
    inner_PC = (grouped_linear(x_PI, a, pairs) * scales_TC[pairs.tokens_P]).to(x_PI.dtype)
    return product_PO + grouped_linear(inner_PC, b, pairs)


@torch.library.custom_op("headrace::expert_low_rank", mutates_args=())
def _expert_low_rank(
    x_PI: torch.Tensor,
    product_PO: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ends_E: torch.Tensor,
    tokens_P: torch.Tensor,
) -> torch.Tensor:
    # An operation may not hand out what it was given.
    if current_rows() is None:
        return product_PO.clone()
    return _with_adapters(x_PI, product_PO, a, b, Pairs(ends_E, tokens_P))


@_expert_low_rank.register_fake
def _(
    x_PI: torch.Tensor,
    product_PO: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ends_E: torch.Tensor,
    tokens_P: torch.Tensor,
) -> torch.Tensor:
    return torch.empty_like(product_PO, memory_format=torch.contiguous_format)
