"""The built-in engine: continuous batching over one transformers model, one forward pass a step.

In: requests (``submit``), new weights (``apply``). Out: finished completions from ``step``, each token with
its float32 log-probability and the version of the weights whose pass produced it. Everything here is
synchronous; ``driver.py`` puts an event loop around it. Weights change only between two passes. Where there
is room for adapters, every request is computed with that of its policy, and versions are the adapter's own.

With a pipelined executor a pass is launched before the tokens of the last one are known here. A sequence
that turns out to have ended then has one row too many in the pass on its way; that row's draw is thrown
away, and what it wrote lies behind everything that anybody reads.

What is bit-identical: on a CPU in float32 with a dense model, the tokens and log-probabilities of a request
do not depend on the other requests, on chunk boundaries, cache hits, preemption or resumption. With
experts, bfloat16 or a GPU only the noise is; log-probabilities agree to rounding.

Shape legend: R rows that are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from headrace.data.routing import check_routing
from headrace.engines.executor import Executor, Flight
from headrace.engines.gathering import Gathering
from headrace.engines.holds import Holds
from headrace.engines.kv_cache import BlockPool
from headrace.engines.policies import POLICY, Policies
from headrace.engines.scheduler import Scheduler, Work
from headrace.engines.scores import RowLogits, score_in_chunks, top_in_chunks
from headrace.engines.sequences import Sequence, new_sequence, resting_completion
from headrace.errors import TaskError, WeightSyncError
from headrace.timekeeping import TimeLedger
from headrace.types import (
    Completion,
    FinishReason,
    Request,
    SamplingMask,
    TeacherScores,
    TensorBlob,
    TensorPatch,
)

T = TypeVar("T")

_NOBODYS = -1
"""The version of blocks that are never found by anybody else."""


@dataclass(slots=True)
class _InFlight:
    flight: Flight
    tenants: np.ndarray
    """int64 [R], who had the slots when the pass was launched."""
    versions: np.ndarray
    """int32 [R], of the weights it is computed with."""
    computed: np.ndarray
    """int64 [3, S], of all slots it has rows of: slot, tenant, and how many rows of it are computed then."""


class TorchEngine:
    """Samples with one model on one device, through the executor it is given."""

    def __init__(
        self,
        executor: Executor,
        *,
        ledger: TimeLedger,
        version: int = 0,
        prefill_tokens: int = 512,
        recompute_kv: bool = False,
    ) -> None:
        """``prefill_tokens``: prompt tokens in one pass, at most. ``recompute_kv``: after an update running
        requests compute their keys and values anew instead of keeping the old ones."""
        self._policies = Policies(executor.held.num_adapters, version)
        self.limit_tokens = executor.limit_tokens
        self._executor = executor
        self._ledger = ledger
        self._prefill_tokens = prefill_tokens
        self._recompute_kv = recompute_kv
        self._table = executor.table
        self._pool = BlockPool(executor.num_blocks)
        self._holds = Holds(self._pool, ledger.now)
        gathering = Gathering(executor.prompts_apart)
        self._scheduler = Scheduler(self._pool, self._table, self._holds, prefill_tokens, gathering)
        self._live: dict[str, Sequence] = {}
        self._done: list[tuple[str, Completion]] = []
        self._in_flight: _InFlight | None = None

    @property
    def version(self) -> int:
        """Of the weights; where there are adapters, the lowest version of any."""
        return self._policies.version

    @property
    def has_work(self) -> bool:
        """True when ``step`` would do something."""
        return bool(self._done) or self._in_flight is not None or self._scheduler.has_work

    @property
    def num_started(self) -> int:
        """Requests of which something was computed and which are not finished."""
        return self._scheduler.num_started

    def hold(self, holding: bool) -> None:
        """While held, requests that were not started stay waiting."""
        self._scheduler.holding = holding

    def submit(self, request: Request) -> None:
        """Queue a request. Raises TaskError, or RecordError where its prefix has routes of another model, and queues
        nothing, when it can never be computed or is no branch of the request it is said to leave."""
        num_prompt = len(request.prompt_ids)
        if not 0 < num_prompt < self.limit_tokens:
            raise TaskError(
                f"request {request.id!r} has a prompt of {num_prompt} tokens and the engine takes 1 to "
                f"{self.limit_tokens - 1}; shorten the prompt, or give the engine room up to the model's context "
                "(engine.kv_tokens, engine.memory_share)."
            )
        if request.id in self._live:
            raise TaskError(f"request id {request.id!r} is already in use; ids must differ while they live.")
        self._check_tokens(f"request {request.id!r}", request.prompt_ids)
        if request.prefix is not None:
            self._check_tokens(f"the prefix of request {request.id!r}", request.prefix.token_ids)
        self._check_routes(request)
        self._holds.check(request)
        limit = min(num_prompt + request.sampling.max_tokens, self.limit_tokens)
        sequence = new_sequence(request, limit, self._policies.adapter_of(request.policy))
        reason = _already_finished(sequence)
        if reason is not None:
            self._done.append((request.id, resting_completion(sequence, reason)))
            return
        self._live[request.id] = sequence
        self._scheduler.waiting.append(sequence)

    def abort(self, request_ids: Iterable[str]) -> list[tuple[str, Completion]]:
        """End these requests with what they have sampled; ids that are not here are ignored."""
        names = dict.fromkeys(request_ids)
        done = [pair for pair in self._done if pair[0] in names]
        self._done = [pair for pair in self._done if pair[0] not in names]
        found = [(name, self._live.pop(name)) for name in names if name in self._live]
        for _, sequence in found:
            if sequence.slot < 0:
                self._scheduler.waiting.remove(sequence)
        self._scheduler.finish(*(sequence for _, sequence in found if sequence.slot >= 0))
        return done + [(name, resting_completion(sequence, "abort")) for name, sequence in found]

    def release(self, request_ids: Iterable[str]) -> None:
        """Hold the blocks of these finished requests no longer; ids that are not held are ignored."""
        self._holds.release(request_ids)

    def tidy(self) -> None:
        """Do now what else would be done when the next request needs it."""
        self._pool.tidy()

    def started_ids(self) -> list[str]:
        return [name for name, sequence in self._live.items() if sequence.started]

    def step(self) -> list[tuple[str, Completion]]:
        """Launch one forward pass and book the tokens of the latest that was left to run; returns the
        requests this finished."""
        self._ledger.switch("decode")
        done, self._done = self._done, []
        self._holds.expire()
        work = self._scheduler.next_work(self._policies.versions)
        num_prefill = sum(chunk.stop - chunk.start for chunk in work.chunks)
        landing, self._in_flight = self._in_flight, None
        if num_prefill or len(work.decode):
            self._in_flight = self._launch(work)
            self._scheduler.counters.passes += 1
            self._scheduler.counters.prompt_passes += num_prefill > 0
        if landing is not None:
            done += self._land(landing)
        if not self._executor.pipelined:
            done += self._landed()
        shares = {"prefill": float(num_prefill), "decode": float(len(work.decode))}
        self._ledger.split(shares if num_prefill + len(work.decode) else {"decode": 1.0}, "idle-no-work")
        self._scheduler.counters.prefill_tokens += num_prefill
        return done

    def progress(self, min_new_tokens: int = 1, *, most: int | None = None) -> list[tuple[str, Completion]]:
        """Snapshots of running requests that sampled at least so many tokens since their last one, those with the
        most new tokens first. No more are taken at a time than keep up with the tokens, or than ``most``: requests
        that began together would otherwise be due together, and the next pass would wait for all of them to be
        copied and sent."""
        if most == 0:
            return []
        table, running = self._table, self._scheduler.running
        slots = np.fromiter((sequence.slot for sequence in running), dtype=np.int64, count=len(running))
        new = table.booked[slots] - table.reported[slots]
        due = np.flatnonzero(new >= min_new_tokens)
        enough = -(-len(running) // min_new_tokens)
        chosen = due[np.argsort(-new[due], kind="stable")[: enough if most is None else min(most, enough)]]
        table.reported[slots[chosen]] = table.booked[slots[chosen]]
        return [(running[i].request.id, table.completion(running[i])) for i in chosen.tolist()]

    def weights(self, names: Iterable[str] = (), *, policy: str | None = None) -> Iterator[TensorBlob]:
        """The model's weights that are computed with, where they lie, or those of a policy's adapter; they change
        in ``apply`` and ``apply_adapter`` alone. ``names`` are those an update of the model uses: of memory, as
        without any, or of the checkpoint."""
        if policy is None:
            return self._executor.held.blobs(names)
        return self._executor.held.adapter_blobs(self._policies.adapter_of(policy))

    @property
    def num_adapters(self) -> int:
        """Adapters there is room for."""
        return self._executor.held.num_adapters

    def apply(self, version: int, updates: Iterable[TensorBlob | TensorPatch]) -> None:
        """Change the weights. Raises WeightSyncError, with nothing changed, if the updates do not fit."""
        if self.num_adapters:
            raise WeightSyncError(
                "the engine serves adapters, whose model must stay as it is; publish an adapter (lora.rank above 0), "
                "or start the engine without room for adapters"
            )
        self._executor.held.load(updates)
        self._policies.versions[0] = version
        self._renew(0)

    def apply_adapter(self, policy: str, version: int, updates: Iterable[TensorBlob | TensorPatch]) -> None:
        """Create or replace the adapter of a policy, as ``apply`` does; other policies go on untouched."""
        adapter = self._policies.room_for(policy)
        self._executor.held.load_adapter(adapter, updates)
        self._policies.settle(policy, adapter, version)
        self._renew(adapter)

    def wait_until_copied(self) -> None:
        """Until the bytes that ``apply`` or ``apply_adapter`` was given are read, and may be written over."""
        self._executor.held.wait_until_copied()

    def version_of(self, policy: str) -> int:
        """Of the policy's adapter; -1: it has not arrived. Raises WeightSyncError where it would find no room."""
        return int(self._policies.versions[self._policies.room_for(policy)])

    def score(
        self,
        token_ids: Several[np.ndarray],
        temperature: float = 1.0,
        policy: str = POLICY,
        masks: Several[SamplingMask | None] | None = None,
    ) -> list[np.ndarray]:
        """float32 [T] logprobs of each sequence's tokens under the policy's weights; entry 0 is 0. ``masks``: the
        tokens they were chosen among, where those were not all."""
        sets = [None] * len(token_ids) if masks is None else masks
        scores = [partial(score_in_chunks, temperature=temperature, mask=mask) for mask in sets]
        return self._scored(token_ids, policy, scores)

    def score_top(
        self, token_ids: Several[np.ndarray], top_k: int, temperature: float = 1.0, policy: str = POLICY
    ) -> list[TeacherScores]:
        """As ``score``, with the likeliest tokens of every position."""
        score = partial(top_in_chunks, temperature=temperature, top_k=top_k)
        return self._scored(token_ids, policy, [score] * len(token_ids))

    def counters(self) -> dict[str, float]:
        counters = self._scheduler.counters
        return {
            "passes": counters.passes,
            "prompt_passes": counters.prompt_passes,
            "generated_tokens": counters.generated_tokens,
            "prefill_tokens": counters.prefill_tokens,
            "cache_hit_tokens": counters.cache_hit_tokens,
            "preemptions": counters.preemptions,
            "forks": counters.forks,
            "forks_stale": counters.forks_stale,
            "forks_freed": counters.forks_freed,
            "forked_tokens": counters.forked_tokens,
            "holds": len(self._holds),
            "holds_given_up": self._holds.num_given_up,
            "holds_expired": self._holds.num_expired,
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "free_blocks": self._pool.num_free,
        }

    def _launch(self, work: Work) -> _InFlight:
        """Start a pass and note what it computes; its tokens count as part of their sequences from here on."""
        flight, table = self._executor.launch(work), self._table
        versions, at = self._policies.versions, table.computed[work.decode]
        table.row_versions[work.decode, at] = versions[table.adapter[work.decode]]
        table.computed[work.decode] = at + 1
        for chunk in work.chunks:
            slot = chunk.sequence.slot
            table.row_versions[slot, chunk.start : chunk.stop] = versions[chunk.sequence.adapter]
            table.computed[slot] = chunk.stop
        table.length[flight.slots] += 1
        rows = np.append(work.decode, [chunk.sequence.slot for chunk in work.chunks]).astype(np.int64)
        return _InFlight(
            flight,
            table.tenant[flight.slots],
            versions[table.adapter[flight.slots]],
            np.stack((rows, table.tenant[rows], table.computed[rows])),
        )

    def _landed(self) -> list[tuple[str, Completion]]:
        """What the pass on its way finishes, if there is one."""
        landing, self._in_flight = self._in_flight, None
        return [] if landing is None else self._land(landing)

    def _land(self, launched: _InFlight) -> list[tuple[str, Completion]]:
        """Book the tokens a pass drew, and take out what is finished."""
        drawn, slots, table = launched.flight.wait(), launched.flight.slots, self._table
        self._land_routes(launched)
        # A sequence that left its slot meanwhile has no use for the token: it is drawn again, or never needed.
        present = table.tenant[slots] == launched.tenants
        rows = np.flatnonzero(present)
        slots, token_ids = slots[rows], drawn.token_ids[rows]
        for row, kept in drawn.kept.items():
            if present[row]:
                self._scheduler.by_slot[int(launched.flight.slots[row])].kept.append(kept)
        table.book(slots, token_ids, drawn.logprobs[rows], launched.versions[rows])
        self._scheduler.counters.generated_tokens += len(slots)
        return self._collect(slots, token_ids)

    def _check_tokens(self, told: str, token_ids: np.ndarray) -> None:
        """Before any is looked up, which a GPU would not survive."""
        wrong = token_ids[(token_ids < 0) | (token_ids >= self._executor.vocab_size)]
        if len(wrong):
            raise TaskError(
                f"{told} has token {int(wrong[0])}, and the model knows 0 to {self._executor.vocab_size - 1}; use the "
                "tokenizer that belongs to the model."
            )

    def _check_routes(self, request: Request) -> None:
        routing = None if request.prefix is None else request.prefix.routing
        if routing is not None and self._table.routes is not None:
            shape = self._table.routes.shape
            check_routing(routing, num_tokens=len(routing.recorded), **shape._asdict())

    def _land_routes(self, launched: _InFlight) -> None:
        """Write down what the pass was routed to, before any sequence that it finishes is read."""
        table = self._table
        if table.routes is None:
            return
        for rows in launched.flight.routed:
            table.routes.write(rows)
        slots, tenants, computed = launched.computed
        present = table.tenant[slots] == tenants
        table.routed[slots[present]] = computed[present]

    def _collect(self, slots: np.ndarray, token_ids: np.ndarray) -> list[tuple[str, Completion]]:
        table, finished = self._table, []
        stopped = (table.stop_ids[slots] == token_ids[:, None]).any(axis=1)
        ended = stopped | (table.booked[slots] >= table.limit[slots])
        if not ended.any():
            return []
        sequences = [self._scheduler.by_slot[slot] for slot in slots[ended].tolist()]
        for sequence in sequences:
            if sequence.request.hold_s > 0:
                self._scheduler.hold(sequence, int(self._policies.versions[sequence.adapter]))
        self._scheduler.finish(*sequences)
        for sequence, is_stopped in zip(sequences, stopped[ended].tolist(), strict=True):
            del self._live[sequence.request.id]
            reason: FinishReason = "stop" if is_stopped else "length"
            finished.append((sequence.request.id, resting_completion(sequence, reason)))
        return finished

    def _renew(self, adapter: int) -> None:
        """What was computed with the adapter's old weights is found by nobody new."""
        self._holds.forget(adapter)
        self._pool.forget(adapter)
        if self._recompute_kv:
            # A token on its way is lost with its slot, and with an update after every pass all would be.
            self._done += self._landed()
            for sequence in reversed(self._scheduler.running[:]):
                if sequence.adapter == adapter:
                    self._scheduler.preempt(sequence)

    def _scored(
        self,
        sequences: Several[np.ndarray],
        policy: str,
        scores: Several[Callable[[np.ndarray, int, RowLogits], T]],
    ) -> list[T]:
        """What each of ``scores`` makes of its sequence, which gets the logits of so many rows at a time."""
        adapter = self._policies.adapter_of(policy)
        with self._ledger.activity("prefill"):
            return [
                self._score_one(np.asarray(ids, dtype=np.int64), adapter, score)
                for ids, score in zip(sequences, scores, strict=True)
            ]

    def _score_one(
        self, token_ids: np.ndarray, adapter: int, score: Callable[[np.ndarray, int, RowLogits], T]
    ) -> T:
        if len(token_ids) > self.limit_tokens:
            raise TaskError(
                f"a sequence of {len(token_ids)} tokens cannot be scored by an engine that takes "
                f"{self.limit_tokens}; shorten it, or give the engine room up to the model's context "
                "(engine.kv_tokens, engine.memory_share)."
            )
        self._check_tokens("a sequence to be scored", token_ids)
        blocks = self._borrow(len(token_ids))
        try:
            logits_of = self._executor.scored_logits(token_ids, blocks, adapter)
            scored = score(token_ids, self._prefill_tokens, logits_of)
        finally:
            self._pool.release(blocks)
        self._scheduler.counters.prefill_tokens += max(0, len(token_ids) - 1)
        return scored

    def _borrow(self, num_rows: int) -> list[int]:
        """Blocks for scoring; running requests are sent back to wait if there is no other way."""
        blocks: list[int] = []
        while len(blocks) * self._table.block_size < num_rows:
            block = self._pool.allocate(_NOBODYS)
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
