"""The engine's own memory on the device, and attention over it.

One key-value pool a layer, and for every slot its block table, the token drawn last and its adapter. Two slots beyond
the scheduler's are kept here: one for rows of padding, one for sequences that are only scored.

Shape legend: T rows of a pass, H query heads, K key-value heads, D key head dim, E value head dim, B blocks,
S rows of a block, W width of a key-value row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.engines.device_kernels import DecodeRows, Kernels, PieceRows
from headrace.engines.device_model import LayerShape
from headrace.kernels.rotation import Rotation
from headrace.models.device_attention import LayerOptions


class DeviceState:
    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        row_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``row_blocks``: blocks of the longest sequence."""
        self.block_size = block_size
        self.row_blocks = row_blocks
        self.padding_slot = num_slots
        self.scoring_slot = num_slots + 1
        self.pools = [
            torch.zeros((num_blocks, block_size, layer.row_width), dtype=dtype, device=device)
            for layer in layers
        ]
        self.tables = torch.zeros((num_slots + 2, row_blocks), dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_slots + 2, dtype=torch.int32, device=device)
        self.adapter = torch.zeros(num_slots + 2, dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        return self.tables.device


def block_bytes(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """What one block takes over all layers."""
    return sum(layer.row_width for layer in layers) * block_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class PoolAttending:
    """Attention of one pass, whose keys and values are in their places in the pool afterwards."""

    state: DeviceState
    kernels: Kernels
    rows: DecodeRows | PieceRows

    @property
    def num_layers(self) -> int:
        return len(self.state.pools)

    def attend(
        self,
        layer: int,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKE: torch.Tensor,
        rotation: Rotation | None,
        options: LayerOptions,
    ) -> torch.Tensor:
        given = query_THD, key_TKD, value_TKE, rotation, self.state.pools[layer]
        if isinstance(self.rows, DecodeRows):
            return self.kernels.decode(*given, self.rows, options)
        return self.kernels.prefill(*given, self.rows, options)
