"""Decode passes of fixed sizes: their memory, and the CUDA graphs that replay them.

In: the decoding slots of a pass. Out: one drawn token and its log-probability a row, in device memory. A pass
is padded to a bucket that holds it; rows of padding belong to a slot and a block that nobody reads. A graph holds
addresses, so everything a bucket reads and writes stays where it is, the weights included. Matrix products
of more rows sometimes take less time, so captured buckets are timed and a pass goes to the quickest that holds it.

A pass may read prompts that several rows share once for all of them. That takes a launch more a layer, and rows
of one group find most of their prompt in the chip's cache anyway, so it pays for many rows or long prompts only. And a
row that is far longer than the others may be split further than theirs, which costs programs that find nothing to do.
Each pass goes to the form that costs it less; all but the plain form of a bucket are captured when they are first used.

Shape legend: B rows of the bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.engines.device_state import DeviceState
from headrace.engines.graphs import Graphs
from headrace.engines.sequences import SlotTable
from headrace.engines.shared_prompts import SharedPromptFinder, SharedPrompts
from headrace.kernels.shared_prefixes import SharedPrefixes
from headrace.models.uploads import to_pinned

_FIELDS = 7
_SHARING_FIELDS = 2
_NO_SLOTS = np.zeros(0, dtype=np.int64)
_CLEARLY_QUICKER = 0.98
_TIMED_REPLAYS = 2
_UNEVEN_PASSES = 16
"""Of a bucket, before the form for them is worth the time that capturing it takes."""


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


def quickest(seconds: Sequence[float]) -> list[int]:
    """For each bucket, smallest first, the one to use in its place: itself, unless a larger one is clearly quicker."""
    chosen = list(range(len(seconds)))
    for i in reversed(chosen[:-1]):
        if seconds[chosen[i + 1]] < _CLEARLY_QUICKER * seconds[i]:
            chosen[i] = chosen[i + 1]
    return chosen


class Form(NamedTuple):
    """Of a pass."""

    sharing: bool = False
    """Whether shared prompts are read once."""
    uneven: bool = False
    """Whether rows are split further than usual, for some that are far longer than others."""


class DecodeBatch:
    """The inputs of one bucket as rows of one int64 tensor, so that a single copy brings them all."""

    def __init__(self, size: int, device: torch.device, form: Form) -> None:
        self.size = size
        self.form = form
        num_fields = _FIELDS + _SHARING_FIELDS * form.sharing
        self.inputs = torch.zeros((num_fields, size), dtype=torch.int64, device=device)
        self.slots, self.positions, self.cells, self.seed_keys, self.draws = self.inputs[:5]
        pairs = self.inputs[5].view(torch.int32)
        self.blocks, self.lengths = pairs[:size], pairs[size:]
        self.temperatures = self.inputs[6].view(torch.float32)[:size]
        self.total = self.inputs[6].view(torch.int32)[size : size + 1]
        self.shared: SharedPrefixes | None = None
        if form.sharing:
            self.shared = SharedPrefixes(*_sharing_parts(self.inputs[_FIELDS:].view(torch.int32), size))
        self.graph: torch.cuda.CUDAGraph | None = None

    def fill(self, table: SlotTable, slots: np.ndarray, state: DeviceState, prompts: SharedPrompts) -> None:
        """Bring the rows of these slots, and the prompts they share where this form can read them once."""
        size, count, row_blocks = table.block_size, len(slots), state.row_blocks
        host = np.zeros(self.inputs.shape, dtype=np.int64)
        host[0] = state.padding_slot
        host[2] = state.padding_slot * row_blocks
        at = table.computed[slots]
        column = at // size
        blocks = table.blocks[slots, column]
        host[0, :count], host[1, :count] = slots, at
        host[2, :count] = slots * row_blocks + column
        host[3, :count] = table.seed_key[slots].view(np.int64)
        host[4, :count] = table.length[slots] - table.num_prompt[slots]
        pairs = host[5].view(np.int32)
        pairs[:count] = blocks
        pairs[self.size : self.size + count] = at + 1
        temperatures = host[6].view(np.float32)
        temperatures[: self.size] = 1.0
        temperatures[:count] = table.temperature[slots]
        total = host[6].view(np.int32)[self.size :]
        total[0] = at.sum() + count
        if self.shared is not None:
            begins, members, starts, num_pieces = _sharing_parts(host[_FIELDS:].view(np.int32), self.size)
            begins[:count], members[: len(prompts.members)] = prompts.begins, prompts.members
            starts[: len(prompts.starts)], num_pieces[0] = prompts.starts, prompts.num_pieces
            total[0] -= prompts.begins.sum()
        self.inputs.copy_(to_pinned(host, self.inputs.device), non_blocking=True)


class DecodeBatches:
    """A batch for each bucket and form in use; ``compute`` is captured for each where there are ``graphs``."""

    def __init__(
        self,
        most: int,
        state: DeviceState,
        compute: Callable[[DecodeBatch], None],
        *,
        sharing_pays_tokens: int,
        is_uneven: Callable[[int, int, int], bool],
        graphs: Graphs | None,
        progress: Callable[[str], None],
    ) -> None:
        """``sharing_pays_tokens``: key-value rows a pass must be spared for the form that shares prompts to be
        the cheaper one. ``is_uneven``: of how many rows, the key-value rows of the longest, and those of all."""
        self._compute = compute
        self._state = state
        self._graphs = graphs
        self._sharing_pays_tokens = sharing_pays_tokens
        self._is_uneven = is_uneven
        self._finder = SharedPromptFinder()
        self._sizes = bucket_sizes(most)
        self._plain = [DecodeBatch(size, state.device, Form()) for size in self._sizes]
        self._others: dict[tuple[int, Form], DecodeBatch] = {}
        self.num_tokens_shared = 0
        """Key-value rows of prompts that passes so far did not read, because another row had read them."""
        self._num_uneven = [0] * len(self._sizes)
        self._bucket_used = list(range(len(self._sizes)))
        if graphs is not None:
            for n, batch in enumerate(reversed(self._plain), start=1):
                progress(f"capturing decode graphs {n}/{len(self._plain)}")
                self._capture(batch)
            self._bucket_used = quickest(self._seconds())

    def run(self, table: SlotTable, slots: np.ndarray) -> None:
        prompts = self._finder.find(table, slots)
        bucket = self._bucket_used[bisect_left(self._sizes, len(slots))]
        batch = self._batch(bucket, self._form(bucket, table, slots, prompts), table)
        if batch.form.sharing:
            self.num_tokens_shared += prompts.saved_tokens
        batch.fill(table, slots, self._state, prompts)
        if batch.graph is None:
            self._compute(batch)
        else:
            batch.graph.replay()

    def _form(self, bucket: int, table: SlotTable, slots: np.ndarray, prompts: SharedPrompts) -> Form:
        sharing = prompts.saved_tokens >= self._sharing_pays_tokens
        own = table.computed[slots] + 1
        if sharing:
            own = own - prompts.begins
        uneven = self._is_uneven(self._sizes[bucket], int(own.max()), int(own.sum()))
        self._num_uneven[bucket] += uneven
        return Form(sharing, uneven and self._num_uneven[bucket] >= _UNEVEN_PASSES)

    def _batch(self, bucket: int, form: Form, table: SlotTable) -> DecodeBatch:
        if form == Form():
            return self._plain[bucket]
        if (bucket, form) not in self._others:
            batch = DecodeBatch(self._sizes[bucket], self._state.device, form)
            if self._graphs is not None:
                # Computed before it is captured, so its rows must be nobody's.
                batch.fill(table, _NO_SLOTS, self._state, self._finder.nothing)
                self._capture(batch)
            self._others[bucket, form] = batch
        return self._others[bucket, form]

    def _capture(self, batch: DecodeBatch) -> None:
        assert self._graphs is not None
        batch.graph = self._graphs.capture(partial(self._compute, batch))

    def _seconds(self) -> list[float]:
        """Of a pass of each bucket, all of it padding: what depends on its size and not on its rows."""
        marks = []
        for batch in self._plain:
            assert batch.graph is not None
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            batch.graph.replay()
            begin.record()
            for _ in range(_TIMED_REPLAYS):
                batch.graph.replay()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e-3 / _TIMED_REPLAYS for begin, end in marks]


def _sharing_parts(numbers: Any, size: int) -> tuple[Any, Any, Any, Any]:
    """What ``SharedPrefixes`` consists of, as parts of these int32 [2, 2B], in numpy or torch."""
    return numbers[0, :size], numbers[0, size:], numbers[1, : size // 2 + 1], numbers[1, -1:]
