"""Decode passes of fixed sizes: their memory, and the CUDA graphs that replay them.

In: the decoding slots of a pass. Out: one drawn token and its log-probability a row, in device memory. A pass
is padded to a bucket that holds it; rows of padding belong to a slot and a block that nobody reads. A graph holds
addresses, so everything a bucket reads and writes stays where it is, the weights included. Matrix products
of more rows sometimes take less time, so captured buckets are timed and a pass goes to the quickest that holds it.

A pass may read prompts that several rows share once for all of them. That takes a launch more a layer, and rows
of one group find most of their prompt in the chip's cache anyway, so it pays for many rows or long prompts only. Each
pass goes to the form that costs it less; those that share are captured when they are first used.

Shape legend: B rows of the bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from headrace.engines.device_state import DeviceState
from headrace.engines.graphs import Graphs
from headrace.engines.sequences import SlotTable
from headrace.engines.shared_prompts import SharedPromptFinder, SharedPrompts
from headrace.kernels.dealing import Spans, deal_out, most_spans, write_list
from headrace.kernels.shared_prefixes import SharedPrefixes
from headrace.models.uploads import to_pinned

_NO_SLOTS = np.zeros(0, dtype=np.int64)
_CLEARLY_QUICKER = 0.98
_TIMED_REPLAYS = 2
_NUM_LONG = 5
"""Parts of a batch's inputs that are of 64 bits."""


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


class _Parts(NamedTuple):
    """Of a batch's inputs, which lie in one array so that a single copy brings them all."""

    slots: Any
    positions: Any
    cells: Any
    seed_keys: Any
    draws: Any
    """int64 [B] each."""
    blocks: Any
    lengths: Any
    temperatures: Any
    """int32 [B] twice and float32 [B]."""
    spans: Any
    shared: Any
    """``Spans`` and ``SharedPrefixes``, int32."""


def _parts(inputs: Any, size: int, num_spans: int, int32: Any, float32: Any) -> _Parts:
    """``inputs``: int64 of ``_num_inputs``, in numpy or torch, as are the names of types."""
    long = [inputs[i * size : (i + 1) * size] for i in range(_NUM_LONG)]
    rest, found, at = inputs[_NUM_LONG * size :].view(int32), [], 0
    for length in _short_lengths(size, num_spans):
        found.append(rest[at : at + length])
        at += length
    blocks, lengths, temperatures, span_rows, firsts, *shared = found
    told = Spans(span_rows, firsts), SharedPrefixes(*shared)
    return _Parts._make((*long, blocks, lengths, temperatures.view(float32), *told))


def _short_lengths(size: int, num_spans: int) -> tuple[int, ...]:
    """Of the parts of 32 bits."""
    return size, size, size, num_spans, size + 1, size, size, size // 2 + 1, 1


def _num_inputs(size: int, num_spans: int) -> int:
    return _NUM_LONG * size + -(-sum(_short_lengths(size, num_spans)) // 2)


class DecodeBatch:
    """The inputs of one bucket, where its graph finds them."""

    def __init__(self, size: int, device: torch.device, *, num_at_once: int, sharing: bool = False) -> None:
        """``num_at_once``: spans that rows are dealt out to. ``sharing``: shared prompts are read once."""
        self.size = size
        self.sharing = sharing
        self._num_at_once = num_at_once
        self._num_spans = most_spans(size, num_at_once)
        host, to = self._padding()
        # As little as a pass can be: it may be computed before it is filled.
        write_list(np.ones(size, dtype=np.int64), *to.spans)
        self.inputs = torch.from_numpy(host).to(device)
        parts = _parts(self.inputs, size, self._num_spans, torch.int32, torch.float32)
        self.slots, self.positions, self.cells = parts.slots, parts.positions, parts.cells
        self.seed_keys, self.draws, self.temperatures = parts.seed_keys, parts.draws, parts.temperatures
        self.blocks, self.lengths, self.spans = parts.blocks, parts.lengths, parts.spans
        self.shared = parts.shared if sharing else None
        self.graph: torch.cuda.CUDAGraph | None = None

    def fill(self, table: SlotTable, slots: np.ndarray, state: DeviceState, prompts: SharedPrompts) -> None:
        """Bring the rows of these slots, and the prompts they share where this form can read them once."""
        size, count, row_blocks = table.block_size, len(slots), state.row_blocks
        host, to = self._padding()
        to.slots[:] = state.padding_slot
        to.cells[:] = state.padding_slot * row_blocks
        at = table.computed[slots]
        column = at // size
        to.slots[:count], to.positions[:count] = slots, at
        to.cells[:count] = slots * row_blocks + column
        to.seed_keys[:count] = table.seed_key[slots].view(np.int64)
        to.draws[:count] = table.length[slots] - table.num_prompt[slots]
        to.blocks[:count], to.lengths[:count] = table.blocks[slots, column], at + 1
        to.temperatures[:count] = table.temperature[slots]
        own = to.lengths.astype(np.int64)
        if self.sharing:
            shared = to.shared
            shared.begins[:count], shared.members[: len(prompts.members)] = prompts.begins, prompts.members
            shared.starts[: len(prompts.starts)], shared.num_pieces[0] = prompts.starts, prompts.num_pieces
            own -= shared.begins
        write_list(deal_out(own, self._num_at_once), *to.spans)
        self.inputs.copy_(to_pinned(host, self.inputs.device), non_blocking=True)

    def _padding(self) -> tuple[np.ndarray, _Parts]:
        """Inputs of which every row is padding, and their parts, but for the list of spans."""
        host = np.zeros(_num_inputs(self.size, self._num_spans), dtype=np.int64)
        parts = _parts(host, self.size, self._num_spans, np.int32, np.float32)
        parts.temperatures[:] = 1.0
        return host, parts


class NewBatch(Protocol):
    def __call__(self, size: int, *, sharing: bool = False) -> DecodeBatch: ...


class DecodeBatches:
    """A batch for each bucket and form in use; ``compute`` is captured for each where there are ``graphs``."""

    def __init__(
        self,
        most: int,
        state: DeviceState,
        new_batch: NewBatch,
        compute: Callable[[DecodeBatch], None],
        *,
        sharing_pays_tokens: int,
        graphs: Graphs | None,
        progress: Callable[[str], None],
    ) -> None:
        """``sharing_pays_tokens``: key-value rows a pass must be spared for the form that shares prompts to be
        the cheaper one."""
        self._new_batch = new_batch
        self._compute = compute
        self._state = state
        self._graphs = graphs
        self._sharing_pays_tokens = sharing_pays_tokens
        self._finder = SharedPromptFinder()
        self._sizes = bucket_sizes(most)
        self._plain = [new_batch(size) for size in self._sizes]
        self._sharing: dict[int, DecodeBatch] = {}
        self.num_tokens_shared = 0
        """Key-value rows of prompts that passes so far did not read, because another row had read them."""
        self._bucket_used = list(range(len(self._sizes)))
        if graphs is not None:
            for n, batch in enumerate(reversed(self._plain), start=1):
                progress(f"capturing decode graphs {n}/{len(self._plain)}")
                self._capture(batch)
            self._bucket_used = quickest(self._seconds())

    def run(self, table: SlotTable, slots: np.ndarray) -> None:
        prompts = self._finder.find(table, slots)
        bucket = self._bucket_used[bisect_left(self._sizes, len(slots))]
        sharing = prompts.saved_tokens >= self._sharing_pays_tokens
        batch = self._sharing_batch(bucket, table) if sharing else self._plain[bucket]
        if sharing:
            self.num_tokens_shared += prompts.saved_tokens
        batch.fill(table, slots, self._state, prompts)
        if batch.graph is None:
            self._compute(batch)
        else:
            batch.graph.replay()

    def _sharing_batch(self, bucket: int, table: SlotTable) -> DecodeBatch:
        if bucket not in self._sharing:
            batch = self._new_batch(self._sizes[bucket], sharing=True)
            if self._graphs is not None:
                # Computed before it is captured, so its rows must be nobody's.
                batch.fill(table, _NO_SLOTS, self._state, self._finder.nothing)
                self._capture(batch)
            self._sharing[bucket] = batch
        return self._sharing[bucket]

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
