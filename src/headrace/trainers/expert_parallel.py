"""A mixture's experts divided among ranks: tokens travel to the rank that has their expert, and back.

In: a model whose experts go through transformers' experts interface (fused 3-D weights, one forward for all of
them). Out: the same model with this rank's experts only, whose experts' forward exchanges tokens with the
other ranks of its group. The experts compute with their own forward, so whatever implementation
transformers chooses for the device (grouped products on a GPU) is used here too. Every rank takes part in every
exchange, also with nothing to send.

Gradients need no sum over the group: an expert sees all tokens of the group that chose it.

Legend: T tokens, K experts a token, P = T K pairs of token and expert, M pairs that arrive here, E experts,
O of them on this rank, G ranks of the group, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headrace.errors import ModelError

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the modules that compute the experts of a layer: their weights have a slice for each expert."""
    return {name: module for name, module in model.named_modules() if _has_slices(module)}


def _has_slices(module: nn.Module) -> bool:
    num_experts = vars(module).get("num_experts")
    slices = [parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 3]
    return bool(slices) and all(parameter.shape[0] == num_experts for parameter in slices)


def divide_experts(model: nn.Module, group: dist.ProcessGroup) -> list[nn.Module]:
    """Leave this rank's part of every layer's experts, and of adapters they have; the values are to be filled in.
    Returns the modules that hold all of a layer's."""
    size = group.size()
    modules, divided = expert_modules(model), []
    if not modules:
        raise ModelError(
            f"model: {type(model).__name__} has no experts that could be divided; set trainer.expert_ranks to 1"
        )
    for name, module in modules.items():
        num_experts = int(vars(module)["num_experts"])
        if num_experts % size:
            raise ModelError(
                f"model: {name} has {num_experts} experts, which {size} ranks cannot share evenly; set "
                "trainer.expert_ranks to a number that divides them"
            )
        num_own = num_experts // size
        setattr(module, "num_experts", num_own)  # noqa: B010
        whole = model.get_submodule(_outermost(name))
        for part in whole.modules():
            _keep(part, num_own, num_experts)
        whole.forward = _Exchanging(whole.forward, num_own, group)
        divided.append(whole)
    return divided


def _outermost(name: str) -> str:
    """Of experts with an adapter, the wrapper that is called in their place."""
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return name


def _keep(module: nn.Module, num_own: int, num_experts: int) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        assert parameter.shape[0] == num_experts, f"{key} is not one slice for each expert"
        own = parameter.new_empty((num_own, *parameter.shape[1:]))
        setattr(module, key, nn.Parameter(own, requires_grad=parameter.requires_grad))


class _Exchanging:
    """The forward of a layer's experts over all ranks of the group."""

    def __init__(self, own_experts: Experts, num_own: int, group: dist.ProcessGroup) -> None:
        self._own_experts, self._num_own, self._group = own_experts, num_own, group

    @torch.compiler.disable
    def __call__(
        self, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        experts_P = experts_TK.reshape(-1)
        order_P = experts_P.argsort(stable=True)
        arriving_GO, sending = self._announce(experts_P)
        receiving = arriving_GO.sum(1).tolist()
        tokens_PH = hidden_TH[order_P // experts_TK.shape[1]]
        tokens_MH = _Exchange.apply(tokens_PH, sending, receiving, self._group)
        results_MH = self._compute(tokens_MH, arriving_GO)
        results_PH = _Exchange.apply(results_MH, receiving, sending, self._group)
        back_P = torch.empty_like(order_P)
        back_P[order_P] = torch.arange(order_P.numel(), device=order_P.device)
        results_TKH = results_PH[back_P].view(*experts_TK.shape, -1)
        return (results_TKH * weights_TK[..., None]).sum(1).to(hidden_TH.dtype)

    def _announce(self, experts_P: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """[G, O] how many pairs each rank sends to each expert here, and how many go from here to each rank."""
        size = self._group.size()
        leaving_E = torch.bincount(experts_P, minlength=size * self._num_own)
        arriving_E = torch.empty_like(leaving_E)
        dist.all_to_all_single(arriving_E, leaving_E, group=self._group)
        return arriving_E.view(size, -1), leaving_E.view(size, -1).sum(1).tolist()

    def _compute(self, tokens_MH: torch.Tensor, arriving_GO: torch.Tensor) -> torch.Tensor:
        own_O = torch.arange(self._num_own, device=tokens_MH.device)
        experts_M = own_O.repeat(arriving_GO.shape[0]).repeat_interleave(arriving_GO.reshape(-1))
        # Experts that nobody chose still owe the other ranks a gradient of zeros: one row stands in.
        padded_MH = nn.functional.pad(tokens_MH, (0, 0, 0, 1))
        padded_M1 = nn.functional.pad(experts_M, (0, 1))[:, None]
        ones_M1 = torch.ones_like(padded_M1, dtype=tokens_MH.dtype)
        return self._own_experts(padded_MH, padded_M1, ones_M1)[:-1]


class _Exchange(torch.autograd.Function):
    """Rows by destination out, rows by origin in; gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sending: list[int], receiving: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sending, ctx.receiving, ctx.group = sending, receiving, group
        return _exchange(rows, sending, receiving, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradient, ctx.receiving, ctx.sending, ctx.group), None, None, None


def _exchange(
    rows: torch.Tensor, sending: list[int], receiving: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    arrived = rows.new_empty((sum(receiving), rows.shape[1]))
    dist.all_to_all_single(arrived, rows.contiguous(), receiving, sending, group=group)
    return arrived
