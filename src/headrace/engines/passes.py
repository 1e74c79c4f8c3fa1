"""One forward pass over a flat layout of rows from many sequences.

In: tokens with their positions and block tables. Out: float32 logits of the rows asked for. Rows are
grouped by the padded length of each row alone, and the pass is padded to ``min_rows`` rows, below which
matrix products round otherwise; so a row's result does not depend on the rows beside it.

Shape legend: T rows of the pass, N rows of a group, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.engines.kv_cache import SCRATCH_BLOCK
from headrace.engines.lanes import LaneRows
from headrace.models.adapter_bank import AdapterBank
from headrace.models.head import float_logits
from headrace.models.low_rank import serving
from headrace.models.paged_attention import (
    BlockGroup,
    CausalTables,
    KvTensors,
    LayerCall,
    Masks,
    PagedPlan,
    RowGroup,
    padded_length,
    padded_octave,
)
from headrace.models.resident_kv import LaneGroup

TRIM_STEP = 16
"""Where the padding of a row may vary, it varies by whole steps."""
_COLLECTED_TOKENS = 4096
"""Key-value rows collected for one attention call: few enough to be still in the cache when read."""


class Piece(NamedTuple):
    """Consecutive rows of one sequence, the first at position ``start``."""

    token_ids: np.ndarray
    start: int
    table: np.ndarray
    adapter: int = 0
    only_logits: bool = False
    """Keys and values lie there already, and are written to the scratch block instead."""


class Rows:
    """Collects the rows of one pass."""

    def __init__(
        self, padded: np.ndarray, block_size: int, device: torch.device, tables: CausalTables, *, trims: bool
    ) -> None:
        self._padded = padded
        self._tables = tables
        self._trims = trims
        self._block_size = block_size
        self._device = device
        self._token_ids: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._slots: list[np.ndarray] = []
        self._adapters: list[np.ndarray] = []
        self.groups: list[RowGroup] = []
        self.num_rows = 0

    def add_lane(
        self,
        rows: LaneRows,
        token_ids: np.ndarray,
        positions: np.ndarray,
        tables: np.ndarray,
        adapters: np.ndarray,
    ) -> None:
        """Decoding rows in the order of a lane; ``tables`` is that of all slots."""
        size = self._block_size
        longest = int(positions.max()) + 1
        step, num_blocks = max(TRIM_STEP, size), -(-longest // size)
        read_length = -(-longest // step) * step if self._trims else rows.lane.kv_length
        loads = moves = None
        if rows.loads is not None:
            loads = (self._rows(rows.loads), self._tensor(tables[rows.slots[rows.loads], :num_blocks]))
        if rows.moves is not None:
            moves = (self._tensor(rows.moves[0]), self._tensor(rows.moves[1]))
        where = self._tensor(positions)
        span = slice(self.num_rows, self.num_rows + len(token_ids))
        self.groups.append(
            LaneGroup(span, Masks(where, read_length, self._tables), rows.lane, where, moves, loads)
        )
        slots = tables[rows.slots, positions // size] * size + positions % size
        self._add(token_ids, positions, slots, adapters)

    def add_each(
        self, token_ids: np.ndarray, positions: np.ndarray, tables: np.ndarray, adapters: np.ndarray
    ) -> np.ndarray:
        """Rows with a block table each; returns where in the pass each of them is."""
        lengths = self._padded[positions + 1]
        order = np.argsort(lengths, kind="stable")
        token_ids, positions, tables = token_ids[order], positions[order], tables[order]
        for first, last in _spans(lengths[order]):
            kv_length = int(lengths[order[first]])
            most = max(1, _COLLECTED_TOKENS // kv_length)
            for a in range(first, last, most):
                b = min(a + most, last)
                blocks = tables[a:b, : kv_length // self._block_size].reshape(-1)
                self._group(a, b, blocks, b - a, kv_length, positions)
        where = np.empty(len(order), dtype=np.int64)
        where[order] = self.num_rows + np.arange(len(order))
        slots = tables[np.arange(len(order)), positions // self._block_size] * self._block_size
        self._add(token_ids, positions, slots + positions % self._block_size, adapters[order])
        return where

    def add_chunk(self, token_ids: np.ndarray, start: int, table: np.ndarray, adapter: int = 0) -> None:
        """Consecutive rows of one sequence, which stay in order."""
        self.add_chunks([Piece(token_ids, start, table, adapter)])

    def add_chunks(self, chunks: Sequence[Piece]) -> list[int]:
        """Consecutive rows of many sequences; returns where the last row of each is. Pieces of equal
        padded length and equal row count share a call."""
        alike: dict[tuple[int, int], list[tuple[int, Piece]]] = {}
        for i, chunk in enumerate(chunks):
            lengths = self._padded[chunk.start + 1 : chunk.start + 1 + len(chunk.token_ids)]
            for a, b in _spans(lengths):
                piece = chunk._replace(token_ids=chunk.token_ids[a:b], start=chunk.start + a)
                alike.setdefault((int(lengths[a]), b - a), []).append((i, piece))
        stops = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        ends = [0] * len(chunks)
        for (kv_length, run), members in alike.items():
            most = max(1, _COLLECTED_TOKENS // kv_length)
            for first in range(0, len(members), most):
                part = members[first : first + most]
                self._add_pieces([piece for _, piece in part], kv_length)
                for n, (i, piece) in enumerate(part, start=1):
                    # The pieces of a chunk come in any order; its last row is in the one that ends it.
                    if piece.start + run == stops[i]:
                        ends[i] = self.num_rows - (len(part) - n) * run - 1
        return ends

    def _add_pieces(self, pieces: list[Piece], kv_length: int) -> None:
        size, run = self._block_size, len(pieces[0].token_ids)
        tables = np.stack([piece.table[: kv_length // size] for piece in pieces])
        starts = np.array([piece.start for piece in pieces])
        positions = starts[:, None] + np.arange(run)
        written = np.take_along_axis(tables, positions // size, axis=1)
        written[[piece.only_logits for piece in pieces]] = SCRATCH_BLOCK
        slots = written * size + positions % size
        positions = positions.reshape(-1)
        self._group(0, len(positions), tables.reshape(-1), len(pieces), kv_length, positions)
        token_ids = np.concatenate([piece.token_ids for piece in pieces])
        adapters = np.repeat(np.array([piece.adapter for piece in pieces]), run)
        self._add(token_ids, positions, slots.reshape(-1), adapters)

    def tensors(self, min_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and slots, int64 [T]; padding rows are token 0 at slot 0, a scratch row."""
        token_ids, positions = (
            self._joined(self._token_ids, min_rows),
            self._joined(self._positions, min_rows),
        )
        return token_ids, positions, self._joined(self._slots, min_rows)

    def adapters(self, min_rows: int) -> torch.Tensor:
        """int64 [T]; padding rows have none."""
        return self._joined(self._adapters, min_rows)

    def places(self) -> np.ndarray:
        """int64, the key-value row of every row that is no padding."""
        return np.concatenate(self._slots)

    def _joined(self, parts: list[np.ndarray], min_rows: int) -> torch.Tensor:
        if len(parts) == 1 and self.num_rows >= min_rows:
            return self._tensor(parts[0])
        padding = np.zeros(max(0, min_rows - self.num_rows), dtype=np.int64)
        return self._tensor(np.concatenate([*parts, padding]))

    def _group(
        self, a: int, b: int, blocks: np.ndarray, num_tables: int, kv_length: int, positions: np.ndarray
    ) -> None:
        rows = slice(self.num_rows + a, self.num_rows + b)
        masks = Masks(self._tensor(positions[a:b]), kv_length, self._tables)
        self.groups.append(BlockGroup(rows, masks, self._tensor(blocks.copy()), num_tables))

    def _add(
        self, token_ids: np.ndarray, positions: np.ndarray, slots: np.ndarray, adapters: np.ndarray
    ) -> None:
        self._token_ids.append(token_ids.astype(np.int64))
        self._positions.append(positions)
        self._slots.append(slots)
        self._adapters.append(adapters)
        self.num_rows += len(token_ids)

    def _rows(self, rows: np.ndarray) -> slice | torch.Tensor:
        """Row numbers in rising order, as a slice where they have no gaps: a plain copy is faster."""
        first, end = int(rows[0]), int(rows[-1]) + 1
        return slice(first, end) if end - first == len(rows) else self._tensor(rows)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


def _spans(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Bounds of the runs of equal values."""
    cuts = [0, *(np.flatnonzero(lengths[1:] != lengths[:-1]) + 1).tolist(), len(lengths)]
    return [(a, b) for a, b in pairwise(cuts) if b > a]


class ForwardPass:
    """Runs the model over rows, with keys and values in ``kv``."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KvTensors,
        *,
        limit_tokens: int,
        min_rows: int,
        trims: bool = False,
        bare_head: bool = False,
        bank: AdapterBank | None = None,
    ) -> None:
        """``trims``: how far a row is padded does not change its bits, so shorter is allowed.
        ``bare_head``: logits are the output layer's alone, which saves a layer of calls. ``bank``: the adapters
        that rows may have."""
        self._model = model
        self._kv = kv
        self._min_rows = min_rows
        self._trims = trims
        self._bare_head = bare_head
        self._bank = bank
        self._tables = CausalTables()
        self._device = model.device
        size = kv.block_size
        self.padded = np.array([padded_length(n, size) for n in range(limit_tokens + 1)], dtype=np.int64)
        """The padded key-value length of a row, by its length."""
        # Where rows can be trimmed, lanes may be few and long: rows then change lanes less often.
        lane_length = padded_octave if trims else padded_length
        self.lane_lengths = np.array([lane_length(n, size) for n in range(limit_tokens + 1)], dtype=np.int64)
        """The length of the lane a decoding row belongs to, by its length."""
        # Four dimensions make transformers pass a mask along as it is instead of building one.
        self._no_mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=self._device)

    def rows(self) -> Rows:
        return Rows(self.padded, self._kv.block_size, self._device, self._tables, trims=self._trims)

    def logits(self, rows: Rows, wanted: np.ndarray) -> torch.Tensor:
        """float32 [R, V] of the wanted rows (int64 indices into the pass), in that order."""
        logits_RV, _ = self.traced_logits(rows, wanted)
        return logits_RV

    def traced_logits(self, rows: Rows, wanted: np.ndarray) -> tuple[torch.Tensor, list[LayerCall]]:
        """As ``logits``, with what each layer asked of its attention."""
        token_ids_T, positions_T, slots_T = rows.tensors(self._min_rows)
        plan = PagedPlan(self._kv, slots_T, rows.groups, rows.num_rows)
        adapted = None if self._bank is None else self._bank.rows(rows.adapters(self._min_rows))
        with torch.inference_mode(), serving(adapted):
            logits_RV = self._run(token_ids_T, positions_T, plan, self._kept_rows(wanted, len(token_ids_T)))
            return logits_RV[: len(wanted)].float(), plan.calls

    def _run(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        plan: PagedPlan,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        inputs = {
            "input_ids": token_ids_T.unsqueeze(0),
            "position_ids": positions_T.unsqueeze(0),
            "attention_mask": self._no_mask,
            "use_cache": False,
            "paged_plan": plan,
        }
        if not self._bare_head:
            return self._model(**inputs, logits_to_keep=0 if keep is None else keep).logits[0]
        hidden_TD = self._model.base_model(**inputs).last_hidden_state[0]
        head, kept_RD = self._model.get_output_embeddings(), hidden_TD if keep is None else hidden_TD[keep]
        if kept_RD.dtype == torch.float32 or head.bias is not None:
            return head(kept_RD)
        return float_logits(kept_RD, head.weight)

    def _kept_rows(self, wanted: np.ndarray, num_rows: int) -> torch.Tensor | None:
        """Rows the output layer computes, never fewer than ``min_rows``; None means all, in order."""
        if len(wanted) == num_rows and (wanted == np.arange(num_rows)).all():
            return None
        padding = np.zeros(max(0, self._min_rows - len(wanted)), dtype=np.int64)
        return torch.from_numpy(np.concatenate((wanted, padding))).to(self._device)

    def num_table_entries(self, num_tokens: int) -> int:
        """Blocks a table must name so that every row up to ``num_tokens`` can be padded."""
        return int(self.padded[num_tokens]) // self._kv.block_size
