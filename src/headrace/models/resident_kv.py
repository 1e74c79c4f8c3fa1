"""A dense copy of the keys and values of decoding rows, so that decoding collects no blocks.

A ``Lane`` holds rows of one padded length, one sequence a row, back to back. Each pass appends a token to
every row. A sequence that grows into the next padded length is loaded into that lane from its blocks,
which stay complete: the copy is only ever read from, and losing it costs nothing but a load.

Shape legend: N rows of the lane, L its padded length, W key and value width of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.models.paged_attention import KvTensors, Masks


class Lane:
    """Tensors [capacity, L, W], one a layer."""

    def __init__(self, kv_length: int) -> None:
        self.kv_length = kv_length
        self._layers: dict[int, torch.Tensor] = {}

    def rows(self, layer: int, count: int, like_TW: torch.Tensor) -> torch.Tensor:
        """At least the first ``count`` rows; what they held before is kept."""
        held = self._layers.get(layer)
        if held is None or held.shape[0] < count:
            capacity = max(count, 4 if held is None else 2 * held.shape[0])
            # Left unset: a row is loaded whole before it is read for the first time.
            grown = like_TW.new_empty((capacity, self.kv_length, like_TW.shape[1]))
            if held is not None:
                grown[: held.shape[0]] = held
            held = self._layers[layer] = grown
        return held


@dataclass(slots=True)
class LaneGroup:
    """Decoding rows of one lane, in the order of its rows; a ``RowGroup``."""

    rows: slice
    masks: Masks
    lane: Lane
    places: torch.Tensor
    """int64 [N], row * L + position: where this pass's token goes."""
    moves: tuple[torch.Tensor, torch.Tensor] | None
    """(to, from) rows, filling the gaps of sequences that left."""
    loads: tuple[torch.Tensor, torch.Tensor] | None
    """(rows, block ids) of sequences that joined."""

    def read(self, kv: KvTensors, layer: int, rows_TW: torch.Tensor) -> torch.Tensor:
        count, width = len(self.places), rows_TW.shape[1]
        held = self.lane.rows(layer, count, rows_TW)
        if self.moves is not None:
            held[self.moves[0]] = held[self.moves[1]]
        if self.loads is not None:
            rows, blocks = self.loads
            held[rows] = kv.read(layer, blocks).view(len(rows), self.lane.kv_length, width)
        held.view(-1, width).index_copy_(0, self.places, rows_TW[self.rows])
        return held[:count, : self.masks.kv_length]
