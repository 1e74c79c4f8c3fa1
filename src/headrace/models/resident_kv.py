"""A dense copy of the keys and values of decoding rows, so that decoding collects no blocks.

A ``Lane`` holds rows of one padded length, one sequence a row, each head's keys back to back. Each pass
appends a token to every row. A sequence that grows into the next padded length is loaded into that lane
from its blocks, which stay complete: losing the copy costs nothing but a load.

Shape legend: N rows of the lane, L its padded length, K key-value heads, D head dim, T rows of the pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from headrace.models.paged_attention import KvTensors, Masks, NewRows, split_heads


class Lane:
    """Keys and values [capacity, K, L, D] a layer."""

    def __init__(self, kv_length: int) -> None:
        self.kv_length = kv_length
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, layer: int, count: int, new: NewRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for at least ``count`` rows; what they held before is kept."""
        held = self._layers.get(layer)
        if held is None or held[0].shape[0] < count:
            capacity = max(count, 4 if held is None else 2 * held[0].shape[0])
            key, value = self._zeros(capacity, new.key_TKD), self._zeros(capacity, new.value_TKD)
            if held is not None:
                key[: held[0].shape[0]], value[: held[1].shape[0]] = held
            held = self._layers[layer] = (key, value)
        return held

    def _zeros(self, capacity: int, like_TKD: torch.Tensor) -> torch.Tensor:
        # Zero at first and finite ever after: what lies beyond a row's tokens is masked, but still read.
        return like_TKD.new_zeros((capacity, like_TKD.shape[1], self.kv_length, like_TKD.shape[2]))


@dataclass(slots=True)
class LaneGroup:
    """Decoding rows of one lane, in the order of its rows; a ``RowGroup``."""

    rows: slice
    masks: Masks
    lane: Lane
    positions: torch.Tensor
    """int64 [N], where in its row each new token goes."""
    moves: tuple[torch.Tensor, torch.Tensor] | None
    """(to, from) rows, filling the gaps of sequences that left."""
    loads: tuple[slice | torch.Tensor, torch.Tensor] | None
    """(rows, block ids [rows, blocks]) of sequences that joined."""
    _places: dict[int, torch.Tensor] = field(default_factory=dict)

    def read(self, kv: KvTensors, layer: int, new: NewRows) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(self.positions)
        key, value = self.lane.layer(layer, count, new)
        if self.moves is not None:
            to, since = self.moves
            key[to], value[to] = key[since], value[since]
        if self.loads is not None:
            rows, blocks = self.loads
            loaded = kv.read(layer, blocks.flatten()).view(len(blocks), blocks.shape[1] * kv.block_size, -1)
            new_key, new_value = split_heads(loaded, new)
            key[:, :, : loaded.shape[1]][rows] = new_key
            value[:, :, : loaded.shape[1]][rows] = new_value
        places = self._heads_places(key.shape[1])
        key.view(-1, key.shape[3]).index_copy_(0, places, new.key_TKD[self.rows].flatten(0, 1))
        value.view(-1, value.shape[3]).index_copy_(0, places, new.value_TKD[self.rows].flatten(0, 1))
        return key[:count, :, : self.masks.kv_length], value[:count, :, : self.masks.kv_length]

    def _heads_places(self, num_heads: int) -> torch.Tensor:
        """int64 [N * K], where a token's heads go when rows, heads and positions are counted through."""
        places = self._places.get(num_heads)
        if places is None:
            device, length = self.positions.device, self.lane.kv_length
            starts = torch.arange(len(self.positions) * num_heads, device=device).mul_(length)
            places = (starts.view(-1, num_heads) + self.positions.unsqueeze(1)).flatten()
            self._places[num_heads] = places
        return places
