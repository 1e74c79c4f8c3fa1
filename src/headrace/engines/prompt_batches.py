"""Prompt passes of fixed sizes: their memory, and the CUDA graphs that replay them.

In: pieces of prompts and the rows whose logits are wanted. Out: those logits, in device memory. A pass of few tokens
takes less time to compute than to launch kernel by kernel, so it is padded to a bucket that holds it. Rows of
padding belong to no piece, and to a block that nobody reads. A pass of more rows or pieces than every bucket is
launched as it is. Where nothing is captured passes are padded all the same, so that both ways compute the same.

Shape legend: T rows of the bucket, N pieces of the bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from headrace.engines.device_kernels import PieceRows
from headrace.engines.graphs import Graphs
from headrace.engines.pieces import PieceLayout
from headrace.models.uploads import to_pinned

_MOST_ROWS = 4096
_MOST_PIECES = 128


def bucket_rows(most: int) -> list[int]:
    """Sizes that prompt passes are padded to: the finer the more a row costs."""
    sizes, size = [], 64
    while size < min(most, _MOST_ROWS):
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += octave if size < 256 else octave // 2 if size < 512 else octave // 4
    return [*sizes, min(most, _MOST_ROWS)]


class PromptBatch:
    """The inputs of one bucket as parts of one int64 tensor, so that a single copy brings them all."""

    def __init__(self, num_rows: int, num_pieces: int, device: torch.device) -> None:
        self.num_rows, self.num_pieces = num_rows, num_pieces
        self.inputs = torch.zeros(4 * num_rows + 3 * num_pieces, dtype=torch.int64, device=device)
        rows, pieces, self.wanted = self._parts(self.inputs, torch.int32)
        self.token_ids, self.positions, self.places, self.adapters = rows
        self.slots, self.starts, self.counts, self.offsets = pieces
        self.graph: torch.cuda.CUDAGraph | None = None

    def fill(self, layout: PieceLayout, wanted: np.ndarray) -> None:
        """Bring these pieces, and the rows whose logits are wanted."""
        host = np.zeros(self.inputs.shape, dtype=np.int64)
        rows, pieces, last = self._parts(host, np.int32)
        rows[:, : layout.num_rows], pieces[:, : layout.num_pieces] = layout.rows, layout.pieces
        last[: len(wanted)] = wanted
        self.inputs.copy_(to_pinned(host, self.inputs.device), non_blocking=True)

    def piece_rows(self, tables: torch.Tensor) -> PieceRows:
        return PieceRows(
            tables, self.slots, self.starts, self.counts, self.offsets, self.places, covers_pass=False
        )

    def _parts(self, numbers: Any, int32: Any) -> tuple[Any, Any, Any]:
        """Rows [4, T], pieces as int32 [4, N] and wanted rows [N], in numpy or torch."""
        rows_end, pieces_end = 4 * self.num_rows, 4 * self.num_rows + 2 * self.num_pieces
        rows, pieces = numbers[:rows_end], numbers[rows_end:pieces_end].view(int32)
        return rows.reshape(4, -1), pieces.reshape(4, -1), numbers[pieces_end:]


class PromptBatches:
    """One batch a bucket; ``compute`` is captured for each where there are ``graphs``."""

    def __init__(
        self,
        most_rows: int,
        most_pieces: int,
        device: torch.device,
        compute: Callable[[PromptBatch], None],
        *,
        graphs: Graphs | None,
        progress: Callable[[str], None],
    ) -> None:
        self._compute = compute
        self._sizes = bucket_rows(most_rows)
        self._batches = [
            PromptBatch(size, min(size, most_pieces, _MOST_PIECES), device) for size in self._sizes
        ]
        if graphs is not None:
            for n, batch in enumerate(reversed(self._batches), start=1):
                progress(f"capturing prompt graphs {n}/{len(self._batches)}")
                batch.graph = graphs.capture(partial(compute, batch))

    def run(self, layout: PieceLayout, wanted: np.ndarray) -> bool:
        """Compute these pieces, whose tables the device knows; False: no bucket holds them."""
        bucket = bisect_left(self._sizes, layout.num_rows)
        if bucket == len(self._sizes) or layout.num_pieces > self._batches[bucket].num_pieces:
            return False
        batch = self._batches[bucket]
        batch.fill(layout, wanted)
        if batch.graph is None:
            self._compute(batch)
        else:
            batch.graph.replay()
        return True
