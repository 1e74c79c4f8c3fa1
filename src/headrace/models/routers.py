"""The routers of mixture-of-experts models: found, computed in float32, and what they give experts named to them.

In: a model. Out: the same model whose softmax routers multiply, normalise and choose in float32. Rounding the
logits to bfloat16 makes ties between experts, and engine and trainer then choose differently. A router whose
own forward already does so, or does something else, keeps it.

``scores_of`` weighs experts that somebody else chose as the router weighs its own. It reads the scores of all
experts, so that one which the router would not choose has its true score and a gradient.

Legend: T tokens, H hidden size, E experts, K chosen for each token.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from headrace.errors import ModelError

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the modules that choose experts: their forward returns logits, scores and choices."""
    return {
        name: module
        for name, module in model.named_modules()
        if {"top_k", "num_experts"} <= vars(module).keys() and "weight" in module._parameters
    }


def replayable_routers(model: nn.Module) -> dict[str, nn.Module]:
    """By name, in order of layer; none where the model routes nothing. Raises ModelError where it routes in a way
    that ``scores_of`` does not know."""
    found = routers(model)
    config: Any = getattr(model, "config", None)
    text = None if config is None else config.get_text_config()
    unknown = not found and any(getattr(text, name, None) for name in _EXPERT_COUNTS)
    if unknown or not all(_is_softmax_router(r) or _is_sigmoid_router(r) for r in found.values()):
        raise ModelError(
            f"model: the routers of {type(model).__name__} choose or weigh experts in a way that is not recorded "
            "here; set algo.routing to live"
        )
    return found


def scores_of(router: Any, logits_TE: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
    """[T, K] float32, what the router gives these experts if they are the ones to compute."""
    if _is_softmax_router(router):
        scores_TK = logits_TE.float().softmax(-1).gather(1, experts_TK)
        return scores_TK / scores_TK.sum(-1, keepdim=True) if router.norm_topk_prob else scores_TK
    scores_TK = logits_TE.float().sigmoid().gather(1, experts_TK)
    if router.norm_topk_prob:
        scores_TK = scores_TK / (scores_TK.sum(-1, keepdim=True) + 1e-20)
    return scores_TK * router.routed_scaling_factor


def use_float_routers(model: nn.Module) -> None:
    for router in routers(model).values():
        if _is_softmax_router(router):
            router.forward = MethodType(_float_forward, router)


def _is_softmax_router(router: nn.Module) -> bool:
    return "norm_topk_prob" in vars(router) and not router._buffers


def _is_sigmoid_router(router: nn.Module) -> bool:
    """DeepSeek's: scores of their own for all experts, and a correction that counts for the choice alone."""
    return (
        "e_score_correction_bias" in router._buffers
        and {"norm_topk_prob", "routed_scaling_factor"} <= vars(router).keys()
    )


def _float_forward(router: Any, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_TH = hidden_TH.reshape(-1, hidden_TH.shape[-1])
    logits_TE = F.linear(hidden_TH.float(), router.weight.float())
    scores_TK, experts_TK = logits_TE.softmax(-1).topk(router.top_k, dim=-1)
    if router.norm_topk_prob:
        scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
    return logits_TE, scores_TK, experts_TK
