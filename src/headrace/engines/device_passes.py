"""The passes a device computes: one token for each of many slots, or many tokens of a few.

In: batches and pieces whose arrays are on the device. Out: logits and draws there. Nothing here waits for the
device, and ``decode`` allocates nothing that outlives it, so that it can be captured in a graph.

Shape legend: T rows of a pass, R rows that are sampled, N pieces, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.engines.decode_batches import DecodeBatch
from headrace.engines.device_kernels import DecodeRows, Kernels, PieceRows
from headrace.engines.device_model import DeviceModel
from headrace.engines.device_state import DeviceState, PoolAttending
from headrace.engines.truncated_draws import CutRows
from headrace.kernels.truncation import TruncatedDraws, new_draws
from headrace.models.uploads import to_pinned


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one sequence, the first at position ``start``."""

    slot: int
    start: int
    token_ids: np.ndarray
    blocks: np.ndarray
    """Its block table, up to the last row at least."""
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """int64 [R] twice and float32 [R]: what a draw depends on besides the logits."""

    seed_keys: torch.Tensor
    positions: torch.Tensor
    temperatures: torch.Tensor


class DevicePasses:
    def __init__(self, model: DeviceModel, state: DeviceState, kernels: Kernels, max_rows: int) -> None:
        self.state = state
        self._model = model
        self._kernels = kernels
        device = state.device
        # Two sets: a step draws for its decoding rows and for its finished prompts.
        self.logits = torch.zeros((max_rows, model.vocab_size), dtype=torch.float32, device=device)
        self.token_ids = torch.zeros((2, max_rows), dtype=torch.int32, device=device)
        self.logprobs = torch.zeros((2, max_rows), dtype=torch.float32, device=device)

    def adapters_are(self, adapters: np.ndarray) -> None:
        """Tell the device which adapter each of the scheduler's slots has; passes launched later see it."""
        self.state.adapter[: len(adapters)].copy_(
            to_pinned(adapters.copy(), self.state.device), non_blocking=True
        )

    @property
    def sharing_pays_tokens(self) -> int:
        """Key-value rows a pass must be spared for shared prompts to be worth reading apart."""
        pool_BSW = self.state.pools[0]
        return -(-self._kernels.sharing_pays_bytes // (pool_BSW.shape[2] * pool_BSW.itemsize))

    def decode(self, batch: DecodeBatch) -> None:
        """Compute the batch's rows and draw; the first ``batch.size`` rows of the first set are written."""
        state = self.state
        state.tables.view(-1).index_copy_(0, batch.cells, batch.blocks)
        rows = DecodeRows(state.tables, batch.slots, batch.lengths, batch.shared)
        passing = PoolAttending(state, self._kernels, rows)
        logits_RV = self._model.logits(
            state.last_token[batch.slots],
            batch.positions,
            passing,
            out_RV=self.logits[: batch.size],
            adapters_T=state.adapter[batch.slots] if self._model.bank is not None else None,
        )
        self._draw(0, logits_RV, batch.slots, DrawInputs(batch.seed_keys, batch.draws, batch.temperatures))

    def prefill(self, pieces: Sequence[Piece], ends: Sequence[int]) -> torch.Tensor:
        """Compute the pieces; float32 logits [R, V] of the pieces ``ends`` numbers, at their last rows."""
        counts = np.array([len(piece.token_ids) for piece in pieces])
        last_rows = np.cumsum(counts)[list(ends)] - 1
        return self._forward(pieces, counts, last_rows)

    def all_logits(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """float32 [T, V] of every row."""
        counts = np.array([len(piece.token_ids) for piece in pieces])
        return self._forward(pieces, counts, None)

    def draw_prompts(self, logits_RV: torch.Tensor, slots_R: torch.Tensor, inputs: DrawInputs) -> None:
        """Draw the first token of prompts into the second set."""
        self._draw(1, logits_RV, slots_R, inputs)

    def draw_truncated(self, which: int, logits_RV: torch.Tensor, cut: CutRows) -> TruncatedDraws:
        """Draw these rows of a set again, from what truncation leaves of them."""
        rows, state = cut.rows, self.state
        draws = new_draws(len(rows.sources), int(cut.list_starts[-1]), logits_RV.shape[1], state.device)
        self._kernels.sample_truncated(logits_RV, rows, draws)
        self.token_ids[which].index_copy_(0, rows.sources, draws.token_ids)
        self.logprobs[which].index_copy_(0, rows.sources, draws.logprobs)
        state.last_token.index_copy_(0, cut.slots, draws.token_ids)
        return draws

    def _draw(self, which: int, logits_RV: torch.Tensor, slots_R: torch.Tensor, inputs: DrawInputs) -> None:
        count = logits_RV.shape[0]
        token_ids_R, logprobs_R = self.token_ids[which, :count], self.logprobs[which, :count]
        self._kernels.sample(
            logits_RV, inputs.seed_keys, inputs.positions, inputs.temperatures, token_ids_R, logprobs_R
        )
        self.state.last_token.index_copy_(0, slots_R, token_ids_R)

    def _forward(
        self, pieces: Sequence[Piece], counts: np.ndarray, wanted: np.ndarray | None
    ) -> torch.Tensor:
        state, size = self.state, self.state.block_size
        positions = np.concatenate([piece.start + np.arange(len(piece.token_ids)) for piece in pieces])
        token_ids = np.concatenate([piece.token_ids for piece in pieces])
        of_piece = np.repeat(np.arange(len(pieces)), counts)
        width = int(positions.max()) // size + 1
        blocks = np.stack([piece.blocks[:width] for piece in pieces])
        places = blocks[of_piece, positions // size] * size + positions % size
        slots = np.array([piece.slot for piece in pieces])
        starts, offsets = np.array([piece.start for piece in pieces]), np.cumsum(counts) - counts
        kept = np.zeros(0, dtype=np.int64) if wanted is None else wanted
        adapters = np.repeat(np.array([piece.adapter for piece in pieces]), counts)
        parts = (
            token_ids,
            positions,
            places,
            slots,
            starts,
            counts,
            offsets,
            kept,
            blocks.reshape(-1),
            adapters,
        )
        (
            ids_T,
            positions_T,
            places_T,
            slots_N,
            starts_N,
            counts_N,
            offsets_N,
            kept_R,
            blocks_flat,
            adapters_T,
        ) = upload(parts, state.device)
        state.tables[:, :width].index_copy_(0, slots_N, blocks_flat.view(-1, width).int())
        rows = PieceRows(
            state.tables, slots_N.int(), starts_N.int(), counts_N.int(), offsets_N.int(), places_T,
            int(counts.max()),
        )  # fmt: skip
        passing = PoolAttending(state, self._kernels, rows)
        return self._model.logits(
            ids_T, positions_T, passing, None if wanted is None else kept_R, adapters_T=adapters_T
        )


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as int64 on the device, brought in one copy."""
    together = to_pinned(np.concatenate([array.astype(np.int64) for array in arrays]), device)
    return list(together.to(device, non_blocking=True).split([len(array) for array in arrays]))
