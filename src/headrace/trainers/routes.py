"""The trainer's side of recorded routes: who replays them, whether they fit the model, and how far it is from them.

In: samples, and the rows of a step as they are computed. Out: metrics over all ranks. ``route_flips`` is the share
of recorded tokens whose live choice of experts is another set than the recorded one, before the step's first update:
layer by layer (of those with experts, counted from 0), as the mean over layers and in the worst one.
``routing_fallback`` is the share of tokens that were routed live for want of a record.

Legend: M mixture-of-experts layers.
"""

from __future__ import annotations

from typing import Literal

import torch
from transformers import PreTrainedModel

from headrace.data.routing import RouterShape, check_routing
from headrace.errors import ModelError, RecordError
from headrace.models.route_replay import RouteReplay
from headrace.models.routers import replayable_routers
from headrace.trainers.logprobs import RowTensors
from headrace.trainers.ranks import Ranks
from headrace.types import Sample

RoutingName = Literal["live", "keep"]


def route_replay(policy: PreTrainedModel, routing: RoutingName, device: torch.device) -> RouteReplay | None:
    """None: the policy routes nothing, or live in a way that is not known here."""
    try:
        found = replayable_routers(policy)
    except ModelError:
        if routing == "keep":
            raise
        return None
    return RouteReplay(policy, keep=routing == "keep", device=device) if found else None


def check_sample_routes(sample: Sample, routers: RouterShape | None) -> None:
    """Raise RecordError unless a sample's routes, if it has any, can be of the model."""
    if sample.routing is None:
        return
    name = f"sample {sample.group}/{sample.attempt}"
    if routers is None:
        raise RecordError(
            f"{name}: it has routes and the model routes nothing; train the model that sampled it"
        )
    try:
        check_routing(sample.routing, num_tokens=sample.num_tokens, **routers._asdict())
    except RecordError as error:
        raise RecordError(f"{name}: {error}") from None


class RouteTally:
    """Of one step; all ranks ask for the metrics, also those without rows."""

    def __init__(self, replay: RouteReplay) -> None:
        self._replay = replay
        self._flips_M = torch.zeros(replay.shape.num_layers, dtype=torch.int64)
        self._num_compared = torch.zeros((), dtype=torch.int64)
        self._num_recorded = torch.zeros((), dtype=torch.int64)
        self._num_tokens = 0

    def add(self, row: RowTensors, *, before_update: bool) -> None:
        """A row that was just computed. Sums stay on the device, so nothing waits for it."""
        routes = row.routes
        self._num_tokens += row.token_ids_T.numel()
        if routes is None:
            return
        num_recorded = routes.recorded_T.sum()
        self._num_recorded = self._num_recorded.to(num_recorded.device) + num_recorded
        if before_update:
            self._flips_M = self._flips_M.to(num_recorded.device) + self._replay.flips()
            self._num_compared = self._num_compared.to(num_recorded.device) + num_recorded

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        counts = (self._num_tokens, int(self._num_recorded), int(self._num_compared))
        num_tokens, num_recorded, num_compared, *flips = ranks.totals(*counts, *self._flips_M.tolist())
        metrics = {}
        if num_compared:
            shares = [count / num_compared for count in flips]
            metrics = {f"route_flips_layer_{layer}": share for layer, share in enumerate(shares)}
            metrics |= {"route_flips": sum(shares) / len(shares), "route_flips_worst": max(shares)}
        if self._replay.keep and num_tokens:
            metrics["routing_fallback"] = 1.0 - num_recorded / num_tokens
        return metrics
