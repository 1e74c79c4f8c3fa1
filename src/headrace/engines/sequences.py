"""One request on its way through the engine, and the table that running ones live in.

A ``Sequence`` waits with its tokens in small arrays of its own. While it runs it occupies a row of the
``SlotTable``, whose parallel arrays let one decode step book 64 tokens with a handful of numpy calls.
Invariant: rows [0, computed) of a slot have keys and values in its blocks or get them from a launched pass,
computed < length, and the tokens [num_prompt, length) were sampled; those of [booked, length) are still
being computed and not here yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.data.routing import merge_routing
from headrace.engines.noise import seed_key
from headrace.engines.route_table import RouteTable, is_whole, routing_of
from headrace.models.paged_attention import padded_length
from headrace.types import NO_KV, Completion, FinishReason, Request, Routing, SamplingMask

_NO_TOKEN = -1


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    limit: int
    """Tokens, prompt included, at which it is finished for length."""
    token_ids: np.ndarray
    """int32, prompt and everything sampled; up to date only while the sequence has no slot."""
    logprobs: np.ndarray
    versions: np.ndarray
    """float32 and int32, of the sampled tokens; as above."""
    kept: list[np.ndarray]
    """Kept token ids of each sampled token; stays empty when nothing is truncated."""
    kv_runs: np.ndarray
    """What wrote the key-value rows when they were last all there (``Completion.kv_versions``)."""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    kv_version: int = -1
    """The version every row of its blocks was computed under, while that is one version."""
    started: bool = False
    adapter: int = 0
    """The adapter it is computed with; 0: none."""
    routing: Routing | None = None
    """Routes of passes before it was given its slot; they are kept, whatever is computed again."""
    num_routes_told: int = 0
    """Tokens whose routes a snapshot has brought, or the request itself."""
    fork_unseen: bool = False
    """It is a branch, and has not started yet."""

    @property
    def num_prompt(self) -> int:
        return int(self.request.prompt_ids.shape[0])


def new_sequence(request: Request, limit: int, adapter: int = 0) -> Sequence:
    prompt_ids, prefix = np.asarray(request.prompt_ids, dtype=np.int32), request.prefix
    if prefix is None:
        nothing = np.zeros(0, dtype=np.int32)
        logprobs = nothing.astype(np.float32)
        is_branch = request.fork is not None
        return Sequence(
            request, limit, prompt_ids, logprobs, nothing, [], NO_KV, adapter=adapter, fork_unseen=is_branch
        )
    routing, num_tokens = prefix.routing, len(prompt_ids) + prefix.num_tokens
    if routing is not None:
        routing = merge_routing([(routing, num_tokens)], num_tokens)
    return Sequence(
        request,
        limit,
        np.concatenate((prompt_ids, prefix.token_ids)).astype(np.int32),
        prefix.logprobs.astype(np.float32),
        prefix.versions.astype(np.int32),
        _kept_rows(prefix) if request.sampling.truncates else [],
        prefix.kv_versions,
        adapter=adapter,
        routing=routing,
        num_routes_told=num_tokens - 1 if is_whole(routing) else 0,
    )


def resting_completion(sequence: Sequence, reason: FinishReason) -> Completion:
    """What a sequence without a slot has sampled."""
    return Completion(
        token_ids=sequence.token_ids[sequence.num_prompt :],
        logprobs=sequence.logprobs,
        versions=sequence.versions,
        finish_reason=reason,
        kv_versions=sequence.kv_runs,
        routing=sequence.routing,
        sampling_mask=_ragged(sequence.kept) if sequence.request.sampling.truncates else None,
    )


class SlotTable:
    """The running sequences as parallel arrays, one row a slot."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.block_size = block_size
        self.length = np.zeros(num_slots, dtype=np.int64)
        self.booked = np.zeros(num_slots, dtype=np.int64)
        self.computed = np.zeros(num_slots, dtype=np.int64)
        self.num_prompt = np.zeros(num_slots, dtype=np.int64)
        self.limit = np.zeros(num_slots, dtype=np.int64)
        self.reported = np.zeros(num_slots, dtype=np.int64)
        self.temperature = np.zeros(num_slots, dtype=np.float32)
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.top_p = np.ones(num_slots, dtype=np.float32)
        self.min_p = np.zeros(num_slots, dtype=np.float32)
        self.truncates = np.zeros(num_slots, dtype=bool)
        self.adapter = np.zeros(num_slots, dtype=np.int64)
        self.seed_key = np.zeros(num_slots, dtype=np.uint64)
        self.stop_ids = np.full((num_slots, 1), _NO_TOKEN, dtype=np.int64)
        self.token_ids = np.zeros((num_slots, 0), dtype=np.int32)
        self.logprobs = np.zeros((num_slots, 0), dtype=np.float32)
        self.versions = np.zeros((num_slots, 0), dtype=np.int32)
        self.row_versions = np.zeros((num_slots, 0), dtype=np.int32)
        self.blocks = np.zeros((num_slots, 0), dtype=np.int64)
        self.tenant = np.zeros(num_slots, dtype=np.int64)
        """A number of its own for every placement; 0 where nobody is."""
        self.num_changes = 0
        """Grows whenever a slot is taken or left."""
        self.num_special = 0
        """Occupied slots whose distribution is not simply the model's own."""
        self.routed = np.zeros(num_slots, dtype=np.int64)
        """Rows of each slot whose routes are in ``routes``; passes on their way bring more."""
        self.routes: RouteTable | None = None
        """None: routes are not recorded."""
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def place(self, sequence: Sequence) -> None:
        """Give the sequence a slot; nothing is computed yet."""
        slot = sequence.slot = self._free.pop()
        sampling, start = sequence.request.sampling, sequence.num_prompt
        self._widen(sequence.limit, len(sampling.stop_ids))
        length = len(sequence.token_ids)
        self.num_changes += 1
        self.num_special += _is_special(sequence)
        self.tenant[slot] = self.num_changes
        self.length[slot] = self.booked[slot] = length
        self.computed[slot] = self.routed[slot] = 0
        self.num_prompt[slot], self.limit[slot], self.reported[slot] = start, sequence.limit, length
        self.temperature[slot], self.top_k[slot] = sampling.temperature, sampling.top_k
        self.top_p[slot], self.min_p[slot] = sampling.top_p, sampling.min_p
        self.truncates[slot] = sampling.truncates
        self.adapter[slot] = sequence.adapter
        self.seed_key[slot] = seed_key(sequence.request.seed)
        self.stop_ids[slot] = _NO_TOKEN
        self.stop_ids[slot, : len(sampling.stop_ids)] = sampling.stop_ids
        self.token_ids[slot, :length] = sequence.token_ids
        self.logprobs[slot, start:length] = sequence.logprobs
        self.versions[slot, start:length] = sequence.versions
        self.blocks[slot] = 0

    def lift(self, sequence: Sequence) -> None:
        """Take the sequence out of its slot; its own arrays are up to date afterwards."""
        slot, start = sequence.slot, sequence.num_prompt
        length = int(self.booked[slot])
        if self.computed[slot] >= length - 1:
            sequence.kv_runs = _runs(self.row_versions[slot, : length - 1])
        sequence.routing = self._routing(sequence)
        sequence.token_ids = self.token_ids[slot, :length].copy()
        sequence.logprobs = self.logprobs[slot, start:length].copy()
        sequence.versions = self.versions[slot, start:length].copy()
        self._free.append(slot)
        self.tenant[slot] = 0
        self.num_changes += 1
        self.num_special -= _is_special(sequence)
        sequence.slot = -1

    def completion(self, sequence: Sequence) -> Completion:
        """A snapshot of a running sequence, finish reason ``abort``; of its routes those that are new since the
        last one, since they are many times the tokens."""
        slot, start = sequence.slot, sequence.num_prompt
        length = int(self.booked[slot])
        whole = self.computed[slot] >= length - 1
        routing = self._routing(sequence, start=sequence.num_routes_told)
        if routing is not None:
            sequence.num_routes_told = length - 1
        return Completion(
            token_ids=self.token_ids[slot, start:length].copy(),
            logprobs=self.logprobs[slot, start:length].copy(),
            versions=self.versions[slot, start:length].copy(),
            finish_reason="abort",
            kv_versions=_runs(self.row_versions[slot, : length - 1]) if whole else sequence.kv_runs,
            routing=routing,
            sampling_mask=_ragged(sequence.kept) if sequence.request.sampling.truncates else None,
        )

    def book(
        self, slots: np.ndarray, token_ids: np.ndarray, logprobs: np.ndarray, versions: np.ndarray
    ) -> None:
        """Write down the next sampled token of each of these slots."""
        at = self.booked[slots]
        self.token_ids[slots, at] = token_ids
        self.logprobs[slots, at] = logprobs
        self.versions[slots, at] = versions
        self.booked[slots] = at + 1

    def _routing(self, sequence: Sequence, start: int = 0) -> Routing | None:
        """Of its tokens from ``start`` on, as far as passes have landed."""
        if self.routes is None and sequence.routing is None:
            return None
        slot = sequence.slot
        return routing_of(
            sequence.routing,
            self.routes,
            self.blocks[slot],
            num_rows=int(self.routed[slot]),
            num_tokens=int(self.booked[slot]),
            start=start,
        )

    def _widen(self, limit: int, num_stops: int) -> None:
        if num_stops > self.stop_ids.shape[1]:
            extra = num_stops - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, extra)), constant_values=_NO_TOKEN)
        width = padded_length(limit, self.block_size)
        if width > self.token_ids.shape[1]:
            extra = width - self.token_ids.shape[1]
            for name in ("token_ids", "logprobs", "versions", "row_versions"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, extra))))
            more_blocks = width // self.block_size - self.blocks.shape[1]
            self.blocks = np.pad(self.blocks, ((0, 0), (0, more_blocks)))


def _is_special(sequence: Sequence) -> bool:
    return sequence.request.sampling.temperature != 1.0 or sequence.request.sampling.truncates


def _runs(versions: np.ndarray) -> np.ndarray:
    """int32 [R, 2] of (version, rows), in order."""
    if versions.size == 0:
        return NO_KV
    if versions[0] == versions[-1]:
        # Rows are written in order of position, so versions never decrease along a sequence.
        return np.array([[versions[0], versions.size]], dtype=np.int32)
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    counts = np.diff(starts, append=len(versions))
    return np.stack((versions[starts], counts), axis=1).astype(np.int32)


def _ragged(kept: list[np.ndarray]) -> SamplingMask:
    offsets = np.cumsum([0, *(len(row) for row in kept)], dtype=np.int64)
    flat = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int32)
    return SamplingMask(token_ids=flat.astype(np.int32), offsets=offsets)


def _kept_rows(prefix: Completion) -> list[np.ndarray]:
    mask = prefix.sampling_mask
    if mask is None:
        return [np.zeros(0, dtype=np.int32)] * prefix.num_tokens
    return [mask.token_ids[a:b] for a, b in zip(mask.offsets[:-1], mask.offsets[1:], strict=True)]
