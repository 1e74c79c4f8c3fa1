"""What a model's routers choose, kept while an engine computes.

In: a model and the most rows of a pass. Out: after each pass, the experts of its rows. Every router writes its
choice into memory that stays where it is, within whatever code the layer is compiled to, so a captured pass
records as it is replayed and nothing waits.

Shape legend: T rows of a pass, M mixture-of-experts layers, K experts a token.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from headrace.data.routing import RouterShape
from headrace.errors import ModelError
from headrace.models.routers import replayable_routers

_ALIGNED = 16


class RouteRecorder:
    def __init__(self, model: nn.Module, max_rows: int, device: torch.device) -> None:
        """The model's routers are changed for good; they must choose something (``recorder`` asks)."""
        found: list[Any] = list(replayable_routers(model).values())
        sizes = {(router.num_experts, router.top_k) for router in found}
        if len(sizes) != 1:
            raise ModelError(
                f"model: {type(model).__name__} has layers with different numbers of experts, whose choices cannot be "
                "recorded; set algo.routing to live"
            )
        self.shape = RouterShape(len(found), *sizes.pop())
        # Numbers above 255 travel as int16: it has the bits of uint16, which kernels know little of.
        dtype = torch.uint8 if self.shape.num_experts <= 256 else torch.int16
        # Whole rows of 16, so that each layer's part begins where kernels read it fastest.
        num_rows = -(-max_rows // _ALIGNED) * _ALIGNED
        self._chosen_MTK = torch.zeros(
            (self.shape.num_layers, num_rows, self.shape.top_k), dtype=dtype, device=device
        )
        for router, chosen_TK in zip(found, self._chosen_MTK, strict=True):
            router.register_buffer("chosen_TK", chosen_TK, persistent=False)
            router.choose = router.forward.__func__
            router.forward = MethodType(_recording_forward, router)

    def rows(self, count: int) -> torch.Tensor:
        """[T, M, K] of the first rows of the pass computed last, where it was computed."""
        return self._chosen_MTK[:, :count].transpose(0, 1).contiguous()


def recorder(model: nn.Module, max_rows: int, device: torch.device) -> RouteRecorder | None:
    """None: the model routes nothing."""
    return RouteRecorder(model, max_rows, device) if replayable_routers(model) else None


def _recording_forward(
    router: Any, hidden_TH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits_TE, scores_TK, experts_TK = router.choose(router, hidden_TH)
    router.chosen_TK[: experts_TK.shape[0]].copy_(experts_TK)
    return logits_TE, scores_TK, experts_TK
