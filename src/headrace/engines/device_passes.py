"""The passes a device computes: one token for each of many slots, or many tokens of a few.

In: batches and pieces whose arrays are on the device. Out: logits and draws there. Nothing here waits for the
device, and ``decode`` and ``prompts`` allocate nothing that outlives them, so that they can be captured in a graph.

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
from headrace.engines.pieces import Piece, PieceLayout, lay_out
from headrace.engines.prompt_batches import PromptBatch
from headrace.engines.truncated_draws import CutRows, to_host
from headrace.kernels.truncation import TruncatedDraws, new_draws
from headrace.models.uploads import to_pinned


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
        self.logits = torch.zeros((max_rows, model.vocab_size), dtype=torch.float32, device=device)
        """Of the pass computed last from a batch, decoding rows or prompts."""
        # Two sets: a step draws for its decoding rows and for its finished prompts. What a row draws lies in one piece
        # of memory, which a single copy brings to the host.
        self._drawn = torch.zeros((2, 2, max_rows), dtype=torch.int32, device=device)
        self.token_ids, self.logprobs = self._drawn[:, 0], self._drawn[:, 1].view(torch.float32)

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

    def batch(self, size: int, *, sharing: bool = False) -> DecodeBatch:
        """For passes of up to ``size`` decoding rows."""
        pool = self.state.pools[0]
        at_once = self._kernels.spans_at_once(size, self._model.layers[0], pool.dtype, sharing=sharing)
        return DecodeBatch(size, pool.device, num_at_once=at_once, sharing=sharing)

    def decode(self, batch: DecodeBatch) -> None:
        """Compute the batch's rows and draw; the first ``batch.size`` rows of the first set are written."""
        state = self.state
        state.tables.view(-1).index_copy_(0, batch.cells, batch.blocks)
        rows = DecodeRows(state.tables, batch.slots, batch.lengths, batch.spans, batch.shared)
        passing = PoolAttending(state, self._kernels, rows)
        logits_RV = self._model.logits(
            state.last_token[batch.slots],
            batch.positions,
            passing,
            out_RV=self.logits[: batch.size],
            adapters_T=state.adapter[batch.slots] if self._model.bank is not None else None,
        )
        self._draw(0, logits_RV, batch.slots, DrawInputs(batch.seed_keys, batch.draws, batch.temperatures))

    def prompts(self, batch: PromptBatch) -> None:
        """Compute the batch's pieces, whose tables are here; the first rows of ``logits`` are those it wants."""
        state = self.state
        self._model.logits(
            batch.token_ids,
            batch.positions,
            PoolAttending(state, self._kernels, batch.piece_rows(state.tables)),
            batch.wanted,
            out_RV=self.logits[: batch.num_pieces],
            adapters_T=batch.adapters,
        )

    def prefill(self, layout: PieceLayout, wanted: np.ndarray | None = None) -> torch.Tensor:
        """Compute pieces, however many, whose tables are here; float32 logits of the wanted rows [R, V], or of all."""
        state, num_rows = self.state, layout.num_rows
        kept = np.zeros(0, dtype=np.int64) if wanted is None else wanted
        rows, pieces, kept_R = upload(
            (layout.rows.reshape(-1), layout.pieces.reshape(-1), kept), state.device
        )
        ids_T, positions_T, places_T, adapters_T = rows.view(4, num_rows)
        slots_N, starts_N, counts_N, offsets_N = pieces.view(4, -1).int()
        attended = PieceRows(state.tables, slots_N, starts_N, counts_N, offsets_N, places_T)
        return self._model.logits(
            ids_T,
            positions_T,
            PoolAttending(state, self._kernels, attended),
            None if wanted is None else kept_R,
            adapters_T=adapters_T,
        )

    def all_logits(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """float32 [T, V] of every row."""
        layout = lay_out(pieces, self.state.block_size)
        self.bring_tables(layout)
        return self.prefill(layout)

    def bring_tables(self, layout: PieceLayout) -> None:
        """Tell the device where the pieces' sequences lie."""
        width = layout.blocks.shape[1]
        slots_N, blocks_flat = upload((layout.pieces[0], layout.blocks.reshape(-1)), self.state.device)
        self.state.tables[:, :width].index_copy_(0, slots_N, blocks_flat.view(-1, width).int())

    def draw_prompts(self, logits_RV: torch.Tensor, slots_R: torch.Tensor, inputs: DrawInputs) -> None:
        """Draw the first token of prompts into the second set."""
        self._draw(1, logits_RV, slots_R, inputs)

    def drawn(self, which: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 and float32 [R], tokens and log-probabilities of a set's first rows, in host memory once the work
        queued so far is done."""
        token_ids_R, logprobs_R = to_host(self._drawn[which])[:, :count]
        return token_ids_R, logprobs_R.view(torch.float32)

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


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as int64 on the device, brought in one copy."""
    together = to_pinned(np.concatenate([array.astype(np.int64) for array in arrays]), device)
    return list(together.to(device, non_blocking=True).split([len(array) for array in arrays]))
