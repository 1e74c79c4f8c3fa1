"""Decode passes of fixed sizes: their memory, and the CUDA graphs that replay them.

In: the decoding slots of a pass. Out: one drawn token and its log-probability a row, in device memory. A pass
is padded to the next bucket; rows of padding belong to a slot and a block that nobody reads. A graph holds
addresses, so everything a bucket reads and writes stays where it is, the weights included.

Shape legend: B rows of the bucket.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.engines.device_state import DeviceState
from headrace.engines.sequences import SlotTable

_FIELDS = 8


def bucket_sizes(most: int) -> list[int]:
    """Sizes that decode passes are padded to: at least 2, and the finer the more a row costs: with many rows
    time goes into arithmetic, with few into reading weights."""
    sizes, size = [], 2
    while size < most:
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += (
            octave if size < 16 else octave // 2 if size < 64 else octave // 4 if size < 128 else octave // 8
        )
    return [*sizes, max(2, most)]


class DecodeBatch:
    """The inputs of one bucket as rows of one int64 tensor, so that a single copy brings them all."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.inputs = torch.zeros((_FIELDS, size), dtype=torch.int64, device=device)
        self.slots, self.positions, self.places, self.cells, self.seed_keys, self.draws = self.inputs[:6]
        pairs = self.inputs[6].view(torch.int32)
        self.blocks, self.lengths = pairs[:size], pairs[size:]
        self.temperatures = self.inputs[7].view(torch.float32)[:size]
        self.graph: torch.cuda.CUDAGraph | None = None

    def fill(self, table: SlotTable, slots: np.ndarray, state: DeviceState) -> None:
        """Bring the rows of these slots."""
        size, count, row_blocks = table.block_size, len(slots), state.row_blocks
        host = np.zeros((_FIELDS, self.size), dtype=np.int64)
        host[0] = state.padding_slot
        host[3] = state.padding_slot * row_blocks
        at = table.computed[slots]
        column = at // size
        blocks = table.blocks[slots, column]
        host[0, :count], host[1, :count] = slots, at
        host[2, :count] = blocks * size + at % size
        host[3, :count] = slots * row_blocks + column
        host[4, :count] = table.seed_key[slots].view(np.int64)
        host[5, :count] = table.length[slots] - table.num_prompt[slots]
        pairs = host[6].view(np.int32)
        pairs[:count] = blocks
        pairs[self.size : self.size + count] = at + 1
        temperatures = host[7].view(np.float32)
        temperatures[: self.size] = 1.0
        temperatures[:count] = table.temperature[slots]
        self.inputs.copy_(to_pinned(host, self.inputs.device), non_blocking=True)


class DecodeBatches:
    """One batch a bucket; ``compute`` is captured for each when ``captured``."""

    def __init__(
        self,
        most: int,
        state: DeviceState,
        compute: Callable[[DecodeBatch], None],
        *,
        captured: bool,
        progress: Callable[[str], None],
    ) -> None:
        self._compute = compute
        self._state = state
        self._batches = [DecodeBatch(size, state.device) for size in bucket_sizes(most)]
        if captured:
            self._capture(progress)

    def run(self, table: SlotTable, slots: np.ndarray) -> None:
        batch = next(batch for batch in self._batches if batch.size >= len(slots))
        batch.fill(table, slots, self._state)
        if batch.graph is None:
            self._compute(batch)
        else:
            batch.graph.replay()

    def _capture(self, progress: Callable[[str], None]) -> None:
        pool = None
        # The largest first: the smaller ones then fit into its memory.
        for n, batch in enumerate(reversed(self._batches), start=1):
            progress(f"capturing decode graphs {n}/{len(self._batches)}")
            self._compute(batch)
            torch.cuda.synchronize()
            batch.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(batch.graph, pool=pool):
                self._compute(batch)
            pool = batch.graph.pool()


def to_pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array in memory that a copy to the device need not wait for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
