"""Passes queued on a GPU and left to run: the host works on the next while the device computes the last.

In: work of the scheduler and the table of slots. Out: flights whose draws arrive later. Decoding rows are one
replay of a CUDA graph, prompts another behind it, or a compiled pass where they are many. Block tables and the
token drawn last for each slot live on the device, so a pass needs nothing of the one before it from the host. All
work goes to one stream: what is launched later sees all that was launched before, new weights included.

The graph draws every row from its whole distribution. Rows that are truncated (top-k, top-p, min-p) are drawn
again behind it, also without a wait; their kept sets travel with the flight (see ``truncated_draws``).

Shape legend: T rows of a pass, R rows that are sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.engines.checks import num_token_ids
from headrace.engines.decode_batches import DecodeBatches
from headrace.engines.device_passes import DrawInputs, upload
from headrace.engines.device_setup import DeviceLimits, prepare
from headrace.engines.graphs import Graphs, many_captures
from headrace.engines.held_weights import HeldWeights
from headrace.engines.pieces import Piece, PieceLayout, lay_out
from headrace.engines.prompt_batches import PromptBatches
from headrace.engines.route_table import RoutedRows, RouteTable
from headrace.engines.sampler import Drawn
from headrace.engines.scheduler import Chunk, Work
from headrace.engines.scores import RowLogits
from headrace.engines.sequences import SlotTable
from headrace.engines.truncated_draws import KeptSets, cut_rows, kept_sets, to_host
from headrace.models.lora import LoraSpec

_NO_TOKENS, _NO_LOGPROBS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)


@dataclass(slots=True)
class DeviceFlight:
    """A launched pass; its draws are on their way to the host."""

    slots: np.ndarray
    token_ids: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    """int32 and float32 in pinned memory, together a row for each slot."""
    kept_sets: list[KeptSets] = field(default_factory=list)
    routed: list[RoutedRows] = field(default_factory=list)
    landed: torch.cuda.Event | None = None

    def wait(self) -> Drawn:
        if self.landed is not None:
            self.landed.synchronize()
        # A pass over the middle of a prompt draws nothing.
        token_ids = np.concatenate([_NO_TOKENS, *(part.numpy() for part in self.token_ids)])
        logprobs = np.concatenate([_NO_LOGPROBS, *(part.numpy() for part in self.logprobs)])
        kept = {row: ids for part in self.kept_sets for row, ids in part.read().items()}
        return Drawn(token_ids, logprobs, kept)


class DeviceExecutor:
    """The model's attention is replaced for good. With ``compiled`` False the same is computed without
    compiling or capturing anything, for debugging and, in tests, on a CPU."""

    pipelined = True
    prompts_apart = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running: int,
        block_size: int,
        kv_tokens: int | None,
        prefill_tokens: int,
        compiled: bool = True,
        memory_share: float = 0.9,
        lora: LoraSpec | None = None,
        num_adapters: int = 1,
        record_routes: bool = False,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """``memory_share``: of the GPU's memory, what the engine may take, weights included. ``lora``: make room
        for so many adapters. ``record_routes``: of models that route."""
        limits = DeviceLimits(
            max_running=max_running,
            block_size=block_size,
            kv_tokens=kv_tokens,
            prefill_tokens=prefill_tokens,
            memory_share=memory_share,
            lora=lora,
            num_adapters=num_adapters,
            record_routes=record_routes,
        )
        prepared = prepare(model, limits, compiled=compiled, progress=progress)
        self.num_blocks, self.limit_tokens = prepared.num_blocks, prepared.limit_tokens
        self.vocab_size = num_token_ids(model)
        self.table = SlotTable(max_running, block_size)
        self.held = HeldWeights(model, prepared.bank)
        self._recorder = prepared.recorder
        if self._recorder is not None:
            self.table.routes = RouteTable(self._recorder.shape, self.num_blocks, block_size)
        self._num_changes_told = -1
        self._device = model.device
        self._reading = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._passes = prepared.passes
        graphs = Graphs() if compiled and prepared.capturable else None
        with many_captures() if graphs is not None else nullcontext():
            # First, since they usually are the largest.
            self._prompts = PromptBatches(
                prefill_tokens,
                max_running,
                model.device,
                self._passes.prompts,
                graphs=graphs,
                progress=progress,
            )
            self._decoding = DecodeBatches(
                max_running,
                self._passes.state,
                self._passes.batch,
                self._passes.decode,
                sharing_pays_tokens=self._passes.sharing_pays_tokens,
                graphs=graphs,
                progress=progress,
            )

    @property
    def num_tokens_shared(self) -> int:
        """Key-value rows of prompts that decode passes did not read, because another row had read them."""
        return self._decoding.num_tokens_shared

    def launch(self, work: Work) -> DeviceFlight:
        table = self.table
        if self.held.num_adapters and self._num_changes_told != table.num_changes:
            self._passes.adapters_are(table.adapter)
            self._num_changes_told = table.num_changes
        last = [i for i, chunk in enumerate(work.chunks) if chunk.stop == table.length[chunk.sequence.slot]]
        ending = np.array([work.chunks[i].sequence.slot for i in last], dtype=np.int64)
        flight = DeviceFlight(np.concatenate((work.decode, ending)))
        if len(work.decode):
            self._bring_known_tokens(work.decode)
            self._decoding.run(table, work.decode)
            if self._recorder is not None:
                self._hand_over_routes(flight, self._places(work.decode))
            self._hand_over(flight, 0, work.decode, self._passes.logits[: len(work.decode)])
        if work.chunks:
            layout = lay_out([self._piece(chunk) for chunk in work.chunks], table.block_size)
            logits_RV = self._prefill(layout, last)
            if self._recorder is not None:
                self._hand_over_routes(flight, layout.places)
            if last:
                self._draw_prompts(ending, logits_RV)
                self._hand_over(flight, 1, ending, logits_RV)
        if self._device.type == "cuda":
            flight.landed = torch.cuda.Event()
            flight.landed.record()
        return flight

    def scored_logits(self, token_ids: np.ndarray, blocks: list[int], adapter: int) -> RowLogits:
        slot, table = self._passes.state.scoring_slot, np.array(blocks)

        def logits_of(start: int, stop: int) -> torch.Tensor:
            return self._passes.all_logits([Piece(slot, start, token_ids[start:stop], table, adapter)])

        return logits_of

    def _bring_known_tokens(self, slots: np.ndarray) -> None:
        """A row whose token is booked may never have drawn here: the last row of a prompt, for one."""
        at = self.table.computed[slots]
        known = slots[at < self.table.booked[slots]]
        if len(known):
            tokens = self.table.token_ids[known, self.table.computed[known]]
            slots_R, tokens_R = upload((known, tokens), self._device)
            self._passes.state.last_token.index_copy_(0, slots_R, tokens_R.int())

    def _piece(self, chunk: Chunk) -> Piece:
        slot = chunk.sequence.slot
        tokens = self.table.token_ids[slot, chunk.start : chunk.stop]
        blocks, adapter = self.table.blocks[slot], chunk.sequence.adapter
        return Piece(slot, chunk.start, tokens, blocks, adapter, chunk.only_logits)

    def _places(self, slots: np.ndarray) -> np.ndarray:
        """int64, where the rows that these slots decode are written."""
        size, at = self.table.block_size, self.table.computed[slots]
        return self.table.blocks[slots, at // size] * size + at % size

    def _prefill(self, layout: PieceLayout, last: list[int]) -> torch.Tensor:
        """float32 [R, V] of the pieces ``last`` numbers, at their last rows; the next pass may write over them."""
        wanted = layout.last_rows(last)
        self._passes.bring_tables(layout)
        if self._prompts.run(layout, wanted):
            return self._passes.logits[: len(wanted)]
        return self._passes.prefill(layout, wanted)

    def _draw_prompts(self, slots: np.ndarray, logits_RV: torch.Tensor) -> None:
        table = self.table
        positions = table.length[slots] - table.num_prompt[slots]
        temperatures = table.temperature[slots].view(np.int32)
        slots_R, seed_keys_R, positions_R, bits_R = upload(
            (slots, table.seed_key[slots].view(np.int64), positions, temperatures), self._device
        )
        inputs = DrawInputs(seed_keys_R, positions_R, bits_R.int().view(torch.float32))
        self._passes.draw_prompts(logits_RV, slots_R, inputs)

    def _hand_over(
        self, flight: DeviceFlight, which: int, slots: np.ndarray, logits_RV: torch.Tensor
    ) -> None:
        """Send the draws of one set on their way to the host."""
        truncated = np.flatnonzero(self.table.truncates[slots])
        if len(truncated):
            cut = cut_rows(self.table, slots[truncated], truncated, logits_RV.shape[1], self._device)
            draws = self._passes.draw_truncated(which, logits_RV, cut)
            before = sum(len(part) for part in flight.token_ids)
            flight.kept_sets.append(kept_sets(draws, cut, before + truncated, self._reading))
        token_ids_R, logprobs_R = self._passes.drawn(which, len(slots))
        flight.token_ids.append(token_ids_R)
        flight.logprobs.append(logprobs_R)

    def _hand_over_routes(self, flight: DeviceFlight, places: np.ndarray) -> None:
        """Send the routes of a pass's rows on their way, before the next pass writes over them."""
        assert self._recorder is not None
        flight.routed.append(RoutedRows(places, to_host(self._recorder.rows(len(places)))))
