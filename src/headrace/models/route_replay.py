"""Experts chosen by an engine's recorded routes, weighed by live scores (Keep Routing, arXiv 2510.11370).

In: a model and, for each row, the record of its tokens. Out: the same model, whose routers hand on the recorded
experts with the scores they give them now, read from the scores of all experts, so that the router learns whatever
it would have chosen itself. A token without a record is routed live. What the routers would have chosen is
compared with the record on the way.

The record of a row stays in force until the next row begins, so a layer that is recomputed in the backward is given
the same experts again. Nothing here is a hook: compiled layers read the record as one of their inputs.

Shape legend: T tokens of a row, M mixture-of-experts layers, E experts, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from headrace.data.routing import RouterShape
from headrace.models.routers import replayable_routers, scores_of


@dataclass(frozen=True, slots=True)
class RowRoutes:
    """The record of one row, on the device."""

    experts_MTK: torch.Tensor
    """uint8 or int16; of no meaning where there is no record."""
    recorded_T: torch.Tensor


class _LayerRoutes:
    """What one router is told of the row in progress."""

    def __init__(self, flips: torch.Tensor, *, keep: bool) -> None:
        self.experts_TK: torch.Tensor | None = None
        self.recorded_T: torch.Tensor | None = None
        self.flips = flips
        """int64 scalar: recorded tokens of the row whose live choice is another set."""
        self.keep = keep


class RouteReplay:
    """The routers of ``model``, whose forwards are replaced. With ``keep`` False routers stay live, and are only
    compared with the records there are."""

    def __init__(self, model: nn.Module, *, keep: bool, device: torch.device) -> None:
        found: list[Any] = list(replayable_routers(model).values())
        first = found[0]
        self.shape = RouterShape(len(found), first.num_experts, first.top_k)
        self.keep = keep
        self._layers = [
            _LayerRoutes(torch.zeros((), dtype=torch.int64, device=device), keep=keep) for _ in found
        ]
        for router, layer in zip(found, self._layers, strict=True):
            router.told = layer
            router.choose = router.forward.__func__
            router.forward = MethodType(_replaying_forward, router)
        model.route_replay = self  # type: ignore[assignment]

    def follow(self, routes: RowRoutes | None) -> None:
        """From now on the model computes this row; None: one without a record."""
        for index, layer in enumerate(self._layers):
            layer.experts_TK = None if routes is None else routes.experts_MTK[index]
            layer.recorded_T = None if routes is None else routes.recorded_T

    def flips(self) -> torch.Tensor:
        """int64 [M], of the row computed last, which had a record."""
        return torch.stack([layer.flips for layer in self._layers])


def follow_routes(model: nn.Module, routes: RowRoutes | None) -> None:
    """Tell the model's routers which row is next, if they listen."""
    replay: RouteReplay | None = model.__dict__.get("route_replay")
    if replay is not None:
        replay.follow(routes)


def _replaying_forward(
    router: Any, hidden_TH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits_TE, scores_TK, experts_TK = router.choose(router, hidden_TH)
    told = router.told
    if told.experts_TK is None:
        return logits_TE, scores_TK, experts_TK
    recorded_TK = told.experts_TK.long()
    differs_T = (recorded_TK.sort(-1).values != experts_TK.sort(-1).values).any(-1)
    told.flips.copy_((differs_T & told.recorded_T).sum())
    if told.keep:
        experts_TK = torch.where(told.recorded_T[:, None], recorded_TK, experts_TK)
        scores_TK = scores_of(router, logits_TE, experts_TK).to(scores_TK.dtype)
    return logits_TE, scores_TK, experts_TK
