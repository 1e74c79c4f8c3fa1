"""Passes computed at once with plain torch operations, on any device: the CPU's way.

In: work of the scheduler and the table of slots. Out: flights that have already landed. Decoding rows keep
a dense copy of their keys and values in lanes, prompts are computed in chunks over their blocks, and all
rows of a pass go through the model together.

Shape legend: T rows of a pass, R rows that are sampled, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.engines.checks import check_model, context_tokens, num_token_ids, stable_rows
from headrace.engines.held_weights import HeldWeights
from headrace.engines.lanes import Lanes
from headrace.engines.noise import NoiseAhead
from headrace.engines.passes import ForwardPass, Piece, Rows
from headrace.engines.route_table import RoutedRows, RouteTable
from headrace.engines.sampler import Drawn, SamplerRows, sample, sample_plainly
from headrace.engines.scheduler import Chunk, Work
from headrace.engines.scores import RowLogits
from headrace.engines.sequences import SlotTable
from headrace.models.adapter_bank import AdapterBank
from headrace.models.lora import LoraSpec
from headrace.models.paged_attention import KvTensors
from headrace.models.route_recording import recorder

_USUAL_TOKENS = 512
"""Tokens a running sequence is given room for when ``kv_tokens`` is not set."""

RESIDENT_BYTES = 512 * 2**20
"""Memory for the dense copies of decoding rows; longer rows collect their blocks in every pass."""


def usual_kv_tokens(context: int, max_running: int) -> int:
    """Room for running sequences of usual length, or for one of the whole context."""
    return max(context, max_running * min(context, _USUAL_TOKENS))


@dataclass(slots=True)
class LandedFlight:
    """A pass that was done when it was launched."""

    slots: np.ndarray
    drawn: Drawn
    routed: list[RoutedRows]

    def wait(self) -> Drawn:
        return self.drawn


class PlainExecutor:
    """The model's attention is replaced for good."""

    pipelined = False
    prompts_apart = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running: int,
        block_size: int,
        kv_tokens: int | None,
        prefill_tokens: int,
        lora: LoraSpec | None = None,
        num_adapters: int = 1,
        record_routes: bool = False,
    ) -> None:
        """``kv_tokens``: rows of key-value memory; None makes room for ``max_running`` sequences of usual
        length, or one of the whole context. ``lora``: make room for so many adapters. ``record_routes``: of
        models that route."""
        facts = check_model(model, block_size=block_size)
        self._bank = None if lora is None else AdapterBank(model, lora, num_adapters)
        context = context_tokens(model.config.get_text_config())
        wanted = kv_tokens or usual_kv_tokens(context, max_running)
        self.num_blocks = -(-wanted // block_size) + 1
        self.limit_tokens = min(context, (self.num_blocks - 1) * block_size)
        self.vocab_size = num_token_ids(model)
        self.table = SlotTable(max_running, block_size)
        self._model = model
        self.held = HeldWeights(model, self._bank)
        self._kv = KvTensors(num_blocks=self.num_blocks, block_size=block_size)
        self._lanes = Lanes(max_running)
        self._noise = NoiseAhead()
        min_rows = max(facts.min_rows, stable_rows([] if self._bank is None else self._bank.products))
        self._recorder = None
        if record_routes:
            self._recorder = recorder(model, max_running + prefill_tokens + min_rows, model.device)
        if self._recorder is not None:
            self.table.routes = RouteTable(self._recorder.shape, self.num_blocks, block_size)
        self._pass = ForwardPass(
            model,
            self._kv,
            limit_tokens=self.limit_tokens,
            min_rows=min_rows,
            trims=facts.trims,
            bare_head=facts.bare_head,
            bank=self._bank,
        )

    def launch(self, work: Work) -> LandedFlight:
        rows = self._pass.rows()
        slots, wanted = self._add_decoding(rows, work.decode)
        last_slots, last_rows = [], []
        for chunk, last in zip(work.chunks, rows.add_chunks(self._pieces(work.chunks)), strict=True):
            if chunk.stop == self.table.length[chunk.sequence.slot]:
                last_slots.append(chunk.sequence.slot)
                last_rows.append(last)
        if last_slots:
            slots, wanted = np.append(slots, last_slots), np.append(wanted, last_rows)
        logits_RV = self._pass.logits(rows, wanted)
        return LandedFlight(slots, self._draw(slots, logits_RV), self._routed(rows))

    def _routed(self, rows: Rows) -> list[RoutedRows]:
        if self._recorder is None:
            return []
        return [RoutedRows(rows.places(), self._recorder.rows(rows.num_rows).cpu())]

    def scored_logits(self, token_ids: np.ndarray, blocks: list[int], adapter: int) -> RowLogits:
        table = np.zeros(self._pass.num_table_entries(len(token_ids)), dtype=np.int64)
        table[: len(blocks)] = blocks

        def logits_of(start: int, stop: int) -> torch.Tensor:
            rows = self._pass.rows()
            rows.add_chunk(token_ids[start:stop], start, table, adapter)
            return self._pass.logits(rows, np.arange(stop - start))

        return logits_of

    def _add_decoding(self, rows: Rows, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add the decoding slots; returns them in another order, and the row of each."""
        table = self.table
        lanes, rest = self._lanes.settled(table.num_changes, slots), slots[:0]
        if lanes is None:
            at = table.computed[slots]
            lengths = self._pass.lane_lengths[at + 1]
            dense = lengths <= self._resident_length()
            kept, rest = slots[dense], slots[~dense]
            lanes = self._lanes.arrange(
                kept, table.tenant[kept], lengths[dense], positions=at[dense], num_changes=table.num_changes
            )
        for lane in lanes:
            where = table.computed[lane.slots]
            tokens, adapters = table.token_ids[lane.slots, where], table.adapter[lane.slots]
            rows.add_lane(lane, tokens, where, table.blocks, adapters)
        ordered = [lane.slots for lane in lanes]
        wanted = np.arange(rows.num_rows)
        if len(rest):
            where = table.computed[rest]
            tokens, blocks = table.token_ids[rest, where], table.blocks[rest]
            wanted = np.append(wanted, rows.add_each(tokens, where, blocks, table.adapter[rest]))
            ordered.append(rest)
        return ordered[0] if len(ordered) == 1 else np.concatenate([slots[:0], *ordered]), wanted

    def _pieces(self, chunks: list[Chunk]) -> list[Piece]:
        table, pieces = self.table, []
        for chunk in chunks:
            slot = chunk.sequence.slot
            tokens = table.token_ids[slot, chunk.start : chunk.stop]
            adapter = chunk.sequence.adapter
            pieces.append(Piece(tokens, chunk.start, table.blocks[slot], adapter, chunk.only_logits))
        return pieces

    def _resident_length(self) -> int:
        """The longest padded length whose rows get a dense copy within the memory allowed for it."""
        # Lanes keep their memory; two to the octave, they add up to under four times the longest.
        return RESIDENT_BYTES // (4 * max(1, self._kv.row_bytes) * len(self.table.length))

    def _draw(self, slots: np.ndarray, logits_RV: torch.Tensor) -> Drawn:
        table = self.table
        with torch.inference_mode():
            if table.num_special:
                return sample(logits_RV, sampler_rows(table, slots))
            position = table.length[slots] - table.num_prompt[slots]
            noise_RV = self._noise.take(table.seed_key[slots], position, logits_RV.shape[1], logits_RV.device)
            return sample_plainly(logits_RV, noise_RV)


def sampler_rows(table: SlotTable, slots: np.ndarray) -> SamplerRows:
    """What the sampler must know to draw the next token of these slots."""
    return SamplerRows(
        temperature=table.temperature[slots],
        top_k=table.top_k[slots],
        top_p=table.top_p[slots],
        min_p=table.min_p[slots],
        seed_key=table.seed_key[slots],
        position=table.length[slots] - table.num_prompt[slots],
    )
