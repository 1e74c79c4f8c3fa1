"""The routers of mixture-of-experts models, computed in float32 whatever the model is computed in.

In: a model. Out: the same model whose softmax routers multiply, normalise and choose in float32. Rounding the
logits to bfloat16 makes ties between experts, and engine and trainer then choose differently. A router whose
own forward already does so, or does something else, keeps it.

Legend: T tokens, H hidden size, E experts, K chosen for each token.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the modules that choose experts: their forward returns logits, scores and choices."""
    return {
        name: module
        for name, module in model.named_modules()
        if {"top_k", "num_experts"} <= vars(module).keys() and "weight" in module._parameters
    }


def use_float_routers(model: nn.Module) -> None:
    for router in routers(model).values():
        if _is_softmax_router(router):
            router.forward = MethodType(_float_forward, router)


def _is_softmax_router(router: nn.Module) -> bool:
    return "norm_topk_prob" in vars(router) and not router._buffers


def _float_forward(router: Any, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_TH = hidden_TH.reshape(-1, hidden_TH.shape[-1])
    logits_TE = F.linear(hidden_TH.float(), router.weight.float())
    scores_TK, experts_TK = logits_TE.softmax(-1).topk(router.top_k, dim=-1)
    if router.norm_topk_prob:
        scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
    return logits_TE, scores_TK, experts_TK
