"""The built-in engine: continuous batching over one transformers model, one forward pass a step.

In: requests (``submit``), new weights (``apply``). Out: finished completions from ``step``, each token with
its float32 log-probability and the version of the weights whose pass produced it. Everything here is
synchronous; ``driver.py`` puts an event loop around it. Weights change only between two passes.

What is bit-identical: on a CPU in float32 with a dense model, the tokens and log-probabilities of a request
do not depend on the other requests, on chunk boundaries, cache hits, preemption or resumption. With
experts, bfloat16 or a GPU only the noise is; log-probabilities agree to rounding.

Shape legend: T rows of a pass, R rows that are sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.engines.checks import check_model, context_tokens
from headrace.engines.kv_cache import BlockPool
from headrace.engines.lanes import Lanes
from headrace.engines.noise import NoiseAhead
from headrace.engines.passes import ForwardPass, Piece, Rows
from headrace.engines.sampler import Drawn, SamplerRows, sample, sample_plainly
from headrace.engines.scheduler import Chunk, Scheduler, Work
from headrace.engines.sequences import Sequence, SlotTable, new_sequence, resting_completion
from headrace.errors import TaskError
from headrace.models.paged_attention import KvTensors
from headrace.models.tensors import load_blobs
from headrace.timekeeping import TimeLedger
from headrace.types import Completion, FinishReason, Request, TensorBlob

_USUAL_TOKENS = 512
"""Tokens a running sequence is given room for when ``kv_tokens`` is not set."""

_RESIDENT_BYTES = 512 * 2**20
"""Memory for the dense copies of decoding rows; longer rows collect their blocks in every pass."""


class TorchEngine:
    """Samples with one model on one device. The model's attention is replaced for good."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ledger: TimeLedger,
        version: int = 0,
        max_running: int = 64,
        block_size: int = 16,
        kv_tokens: int | None = None,
        prefill_tokens: int = 512,
        recompute_kv: bool = False,
    ) -> None:
        """``kv_tokens``: rows of key-value memory; None makes room for ``max_running`` sequences of usual
        length, or one of the whole context. ``recompute_kv``: after an update running requests compute
        their keys and values anew instead of keeping the old ones."""
        assert block_size & (block_size - 1) == 0, "block_size must be a power of two"
        self.version = version
        self._model = model
        self._ledger = ledger
        self._recompute_kv = recompute_kv
        facts = check_model(model, block_size=block_size)
        context = context_tokens(model.config.get_text_config())
        wanted = kv_tokens or max(context, max_running * min(context, _USUAL_TOKENS))
        self._pool = BlockPool(-(-wanted // block_size) + 1)
        self.limit_tokens = min(context, self._pool.capacity * block_size)
        self._table = SlotTable(max_running, block_size)
        self._scheduler = Scheduler(self._pool, self._table, prefill_tokens)
        self._kv = KvTensors(num_blocks=self._pool.num_blocks, block_size=block_size)
        self._lanes = Lanes(max_running)
        self._noise = NoiseAhead()
        self._pass = ForwardPass(
            model,
            self._kv,
            limit_tokens=self.limit_tokens,
            min_rows=facts.min_rows,
            trims=facts.trims,
            bare_head=facts.bare_head,
        )
        self._live: dict[str, Sequence] = {}
        self._done: list[tuple[str, Completion]] = []

    @property
    def has_work(self) -> bool:
        """True when ``step`` would do something."""
        return bool(self._done) or self._scheduler.has_work

    @property
    def num_started(self) -> int:
        """Requests of which something was computed and which are not finished."""
        return self._scheduler.num_started

    def hold(self, holding: bool) -> None:
        """While held, requests that were not started stay waiting."""
        self._scheduler.holding = holding

    def submit(self, request: Request) -> None:
        """Queue a request. Raises TaskError, and queues nothing, when it can never be computed."""
        num_prompt = len(request.prompt_ids)
        if not 0 < num_prompt < self.limit_tokens:
            raise TaskError(
                f"request {request.id!r} has a prompt of {num_prompt} tokens and the engine takes 1 to "
                f"{self.limit_tokens - 1}; shorten the prompt or raise kv_tokens up to the model's context."
            )
        if request.id in self._live:
            raise TaskError(f"request id {request.id!r} is already in use; ids must differ while they live.")
        limit = min(num_prompt + request.sampling.max_tokens, self.limit_tokens)
        sequence = new_sequence(request, limit)
        reason = _already_finished(sequence)
        if reason is not None:
            self._done.append((request.id, resting_completion(sequence, reason)))
            return
        self._live[request.id] = sequence
        self._scheduler.waiting.append(sequence)

    def abort(self, request_ids: Iterable[str]) -> list[tuple[str, Completion]]:
        """End these requests with what they have sampled; ids that are not here are ignored."""
        ended = []
        for request_id in request_ids:
            sequence = self._live.pop(request_id, None)
            if sequence is None:
                continue
            if sequence.slot >= 0:
                self._scheduler.finish(sequence)
            else:
                self._scheduler.waiting.remove(sequence)
            ended.append((request_id, resting_completion(sequence, "abort")))
        return ended

    def started_ids(self) -> list[str]:
        return [name for name, sequence in self._live.items() if sequence.started]

    def step(self) -> list[tuple[str, Completion]]:
        """One forward pass; returns the requests it finished."""
        self._ledger.switch("decode")
        done, self._done = self._done, []
        work = self._scheduler.next_work(self.version)
        num_prefill = sum(chunk.stop - chunk.start for chunk in work.chunks)
        if num_prefill or len(work.decode):
            done += self._compute(work)
        shares = {"prefill": float(num_prefill), "decode": float(len(work.decode))}
        self._ledger.split(shares if num_prefill + len(work.decode) else {"decode": 1.0}, "idle-no-work")
        self._scheduler.counters.prefill_tokens += num_prefill
        return done

    def progress(self, min_new_tokens: int = 1) -> list[tuple[str, Completion]]:
        """Snapshots of running requests that sampled at least so many tokens since their last one."""
        table, snapshots = self._table, []
        for sequence in self._scheduler.running:
            slot = sequence.slot
            if table.length[slot] - table.reported[slot] >= min_new_tokens:
                table.reported[slot] = table.length[slot]
                snapshots.append((sequence.request.id, table.completion(sequence)))
        return snapshots

    def apply(self, version: int, blobs: Iterable[TensorBlob]) -> None:
        """Replace the weights. Raises WeightSyncError, with nothing changed, if the blobs do not fit."""
        load_blobs(self._model, blobs)
        self.version = version
        self._pool.forget()
        if self._recompute_kv:
            for sequence in reversed(self._scheduler.running[:]):
                self._scheduler.preempt(sequence)

    def score(self, token_ids: Several[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        """float32 [T] logprobs of each sequence's tokens under the current weights; entry 0 is 0."""
        with self._ledger.activity("prefill"):
            return [self._score_one(np.asarray(ids, dtype=np.int64), temperature) for ids in token_ids]

    def counters(self) -> dict[str, float]:
        counters = self._scheduler.counters
        return {
            "generated_tokens": counters.generated_tokens,
            "prefill_tokens": counters.prefill_tokens,
            "cache_hit_tokens": counters.cache_hit_tokens,
            "preemptions": counters.preemptions,
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "free_blocks": self._pool.num_free,
        }

    def _compute(self, work: Work) -> list[tuple[str, Completion]]:
        rows = self._pass.rows()
        slots, wanted = self._add_decoding(rows, work.decode)
        last_slots, last_rows = [], []
        for chunk, last in zip(work.chunks, rows.add_chunks(self._pieces(work.chunks)), strict=True):
            slot = chunk.sequence.slot
            self._table.row_versions[slot, chunk.start : chunk.stop] = self.version
            self._table.computed[slot] = chunk.stop
            if chunk.stop == self._table.length[slot]:
                last_slots.append(slot)
                last_rows.append(last)
        if last_slots:
            slots, wanted = np.append(slots, last_slots), np.append(wanted, last_rows)
        logits_RV = self._pass.logits(rows, wanted)
        return self._book(slots, logits_RV) if len(slots) else []

    def _add_decoding(self, rows: Rows, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add the decoding slots; returns them in another order, and the row of each."""
        table = self._table
        at = table.computed[slots]
        lanes, rest = self._lanes.settled(table.num_changes, len(slots)), slots[:0]
        if lanes is None:
            lengths = self._pass.lane_lengths[at + 1]
            dense = lengths <= self._resident_length()
            kept, rest = slots[dense], slots[~dense]
            lanes = self._lanes.arrange(
                kept, table.tenant[kept], lengths[dense], positions=at[dense], num_changes=table.num_changes
            )
        for lane in lanes:
            where = table.computed[lane.slots]
            rows.add_lane(lane, table.token_ids[lane.slots, where], where, table.blocks)
        ordered = [lane.slots for lane in lanes]
        wanted = np.arange(rows.num_rows)
        if len(rest):
            where = table.computed[rest]
            wanted = np.append(wanted, rows.add_each(table.token_ids[rest, where], where, table.blocks[rest]))
            ordered.append(rest)
        table.row_versions[slots, at] = self.version
        table.computed[slots] = at + 1
        return ordered[0] if len(ordered) == 1 else np.concatenate([slots[:0], *ordered]), wanted

    def _pieces(self, chunks: list[Chunk]) -> list[Piece]:
        table, pieces = self._table, []
        for chunk in chunks:
            slot = chunk.sequence.slot
            tokens = table.token_ids[slot, chunk.start : chunk.stop]
            pieces.append(Piece(tokens, chunk.start, table.blocks[slot]))
        return pieces

    def _resident_length(self) -> int:
        """The longest padded length whose rows get a dense copy within the memory allowed for it."""
        # Lanes keep their memory; two to the octave, they add up to under four times the longest.
        return _RESIDENT_BYTES // (4 * max(1, self._kv.row_bytes) * len(self._table.length))

    def _book(self, slots: np.ndarray, logits_RV: torch.Tensor) -> list[tuple[str, Completion]]:
        """Sample a token for each slot, write it down, and take out what is finished."""
        table = self._table
        lengths = table.length[slots]
        position = lengths - table.num_prompt[slots]
        with torch.inference_mode():
            if table.num_special:
                drawn = sample(logits_RV, self._sampler_rows(slots, position))
            else:
                noise_RV = self._noise.take(
                    table.seed_key[slots], position, logits_RV.shape[1], logits_RV.device
                )
                drawn = sample_plainly(logits_RV, noise_RV)
        for row, kept in drawn.kept.items():
            self._scheduler.by_slot[int(slots[row])].kept.append(kept)
        table.append(slots, lengths, drawn.token_ids, drawn.logprobs, self.version)
        self._scheduler.counters.generated_tokens += len(slots)
        return self._collect(slots, lengths + 1, drawn)

    def _sampler_rows(self, slots: np.ndarray, position: np.ndarray) -> SamplerRows:
        table = self._table
        return SamplerRows(
            temperature=table.temperature[slots],
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            min_p=table.min_p[slots],
            seed_key=table.seed_key[slots],
            position=position,
        )

    def _collect(self, slots: np.ndarray, lengths: np.ndarray, drawn: Drawn) -> list[tuple[str, Completion]]:
        table, finished = self._table, []
        stopped = (table.stop_ids[slots] == drawn.token_ids[:, None]).any(axis=1)
        ended = stopped | (lengths >= table.limit[slots])
        if not ended.any():
            return []
        for row in np.flatnonzero(ended).tolist():
            sequence = self._scheduler.by_slot[int(slots[row])]
            self._scheduler.finish(sequence)
            del self._live[sequence.request.id]
            reason: FinishReason = "stop" if stopped[row] else "length"
            finished.append((sequence.request.id, resting_completion(sequence, reason)))
        return finished

    def _score_one(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        logprobs = np.zeros(len(token_ids), dtype=np.float32)
        if len(token_ids) > self.limit_tokens:
            raise TaskError(
                f"a sequence of {len(token_ids)} tokens cannot be scored by an engine that takes "
                f"{self.limit_tokens}; shorten it or raise kv_tokens up to the model's context."
            )
        blocks = self._borrow(len(token_ids))
        table = np.zeros(self._pass.num_table_entries(len(token_ids)), dtype=np.int64)
        table[: len(blocks)] = blocks
        for start in range(0, len(token_ids) - 1, self._scheduler.prefill_tokens):
            stop = min(start + self._scheduler.prefill_tokens, len(token_ids) - 1)
            rows = self._pass.rows()
            rows.add_chunk(token_ids[start:stop], start, table)
            logits_TV = self._pass.logits(rows, np.arange(stop - start))
            targets_T1 = torch.from_numpy(token_ids[start + 1 : stop + 1]).to(logits_TV.device).unsqueeze(1)
            logits_TV = logits_TV if temperature == 1.0 else logits_TV / temperature
            scored_T = logits_TV.gather(1, targets_T1).squeeze(1) - logits_TV.logsumexp(dim=-1)
            logprobs[start + 1 : stop + 1] = scored_T.cpu().numpy()
            self._scheduler.counters.prefill_tokens += stop - start
        self._pool.release(blocks)
        return logprobs

    def _borrow(self, num_rows: int) -> list[int]:
        """Blocks for scoring; running requests are sent back to wait if there is no other way."""
        blocks: list[int] = []
        while len(blocks) * self._table.block_size < num_rows:
            block = self._pool.allocate(self.version)
            if block is not None:
                blocks.append(block)
            else:
                self._scheduler.preempt(self._scheduler.running[-1])
        return blocks


def _already_finished(sequence: Sequence) -> FinishReason | None:
    """A resumed request may have been interrupted just before its end was noticed."""
    prefix, sampling = sequence.request.prefix, sequence.request.sampling
    if prefix is not None and prefix.num_tokens and int(prefix.token_ids[-1]) in sampling.stop_ids:
        return "stop"
    return "length" if len(sequence.token_ids) >= sequence.limit else None
