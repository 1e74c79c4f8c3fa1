"""One forward pass over a flat layout of rows from many sequences.

In: tokens with their positions and block tables, added as decoding rows (one table each) or as chunks
(one table for all). Out: float32 logits of the rows asked for. Rows are grouped by the padded length of
each row alone, and the pass is padded to ``min_rows`` rows, below which matrix products round otherwise.

Shape legend: T rows of the pass, N rows of a group, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.models.paged_attention import KvTensors, PagedPlan, RowGroup, padded_length


class Rows:
    """Collects the rows of one pass."""

    def __init__(self, padded: np.ndarray, block_size: int) -> None:
        self._padded = padded
        self._block_size = block_size
        self._token_ids: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._slots: list[np.ndarray] = []
        self._groups: list[RowGroup] = []
        self.num_rows = 0

    def add_decode(self, token_ids: np.ndarray, positions: np.ndarray, tables: np.ndarray) -> np.ndarray:
        """Rows with a block table each; returns the order in which they were added."""
        size = self._block_size
        classes = self._padded[positions + 1]
        order = np.argsort(classes, kind="stable")
        token_ids, positions, tables, classes = token_ids[order], positions[order], tables[order], classes[order]
        for a, b in _spans(classes):
            kv_length = int(classes[a])
            blocks = np.ascontiguousarray(tables[a:b, : kv_length // size]).reshape(-1)
            self._group(a, b, blocks, b - a, kv_length, positions[a:b])
        slots = tables[np.arange(len(order)), positions // size] * size + positions % size
        self._add(token_ids, positions, slots)
        return order

    def add_chunk(self, token_ids: np.ndarray, start: int, table: np.ndarray) -> None:
        """Consecutive rows of one sequence, the first at position ``start``."""
        size = self._block_size
        positions = np.arange(start, start + len(token_ids))
        classes = self._padded[positions + 1]
        for a, b in _spans(classes):
            kv_length = int(classes[a])
            self._group(a, b, table[: kv_length // size].copy(), 1, kv_length, positions[a:b])
        self._add(token_ids, positions, table[positions // size] * size + positions % size)

    def _group(
        self, a: int, b: int, blocks: np.ndarray, num_tables: int, kv_length: int, positions: np.ndarray
    ) -> None:
        rows = slice(self.num_rows + a, self.num_rows + b)
        where = torch.from_numpy(positions)
        self._groups.append(RowGroup(rows, torch.from_numpy(blocks), num_tables, kv_length, where))

    def _add(self, token_ids: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> None:
        self._token_ids.append(token_ids.astype(np.int64))
        self._positions.append(positions)
        self._slots.append(slots)
        self.num_rows += len(token_ids)

    def tensors(self, min_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and slots, int64 [T]; padding rows are token 0 at slot 0, a scratch row."""
        padding = [np.zeros(max(0, min_rows - self.num_rows), dtype=np.int64)]
        parts = (self._token_ids, self._positions, self._slots)
        token_ids, positions, slots = (torch.from_numpy(np.concatenate(part + padding)) for part in parts)
        return token_ids, positions, slots

    @property
    def groups(self) -> list[RowGroup]:
        return self._groups


def _spans(classes: np.ndarray) -> list[tuple[int, int]]:
    """Bounds of the runs of equal values."""
    cuts = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist(), len(classes)]
    return [(a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True) if b > a]


class ForwardPass:
    """Runs the model over rows, with keys and values in ``kv``."""

    def __init__(self, model: PreTrainedModel, kv: KvTensors, *, limit_tokens: int, min_rows: int) -> None:
        self._model = model
        self._kv = kv
        self._min_rows = min_rows
        self._device = model.device
        size = kv.block_size
        self._padded = np.array([padded_length(n, size) for n in range(limit_tokens + 1)], dtype=np.int64)
        # Four dimensions make transformers pass a mask along as it is instead of building one.
        self._no_mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=self._device)

    def rows(self) -> Rows:
        return Rows(self._padded, self._kv.block_size)

    def logits(self, rows: Rows, wanted: np.ndarray) -> torch.Tensor:
        """float32 [R, V] of the wanted rows (int64 indices into the pass), in that order."""
        logits_RV, _ = self.traced_logits(rows, wanted)
        return logits_RV

    def traced_logits(self, rows: Rows, wanted: np.ndarray) -> tuple[torch.Tensor, dict[int, int]]:
        """As ``logits``, with how often each layer called the paged attention."""
        token_ids_T, positions_T, slots_T = (t.to(self._device) for t in rows.tensors(self._min_rows))
        plan = PagedPlan(self._kv, slots_T, rows.groups, rows.num_rows)
        keep = np.concatenate((wanted, np.zeros(max(0, self._min_rows - len(wanted)), dtype=np.int64)))
        with torch.inference_mode():
            output = self._model(
                input_ids=token_ids_T.unsqueeze(0),
                position_ids=positions_T.unsqueeze(0),
                attention_mask=self._no_mask,
                use_cache=False,
                logits_to_keep=torch.from_numpy(keep).to(self._device),
                paged_plan=plan,
            )
            return output.logits[0, : len(wanted)].float(), plan.calls

    def num_table_entries(self, num_tokens: int) -> int:
        """Blocks a table must name so that every row up to ``num_tokens`` can be padded."""
        return int(self._padded[num_tokens]) // self._kv.block_size
