"""Decides what the next forward pass computes.

In: sequences that wait and sequences that run. Out: for each pass, the slots that decode one token and
the prompt chunks that are prefilled. Every decoding sequence is in every pass; what is left of the token
budget goes to prompts, oldest first.

Before a chunk is computed, blocks with the same content are taken over from other sequences, those of
the same pass included: within a layer all keys and values are written before any are read. Where blocks hold all of
a sequence, its last row is computed once more for its logits, and written nowhere; where routes are recorded, the block
of that row is not taken over. When blocks run out the youngest running sequence is sent back to wait and later computed
again from its tokens. The oldest can always go on, since no sequence may outgrow the pool.

Branches that leave an earlier request at one point are admitted together, when there are slots for all of them:
their siblings are what they are compared with, so they begin under one version of the weights.

Where it pays, waiting sequences are gathered for a few passes while others decode (see ``gathering``); those that were
sent back too, which leaves more blocks to those that go on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from headrace.engines.gathering import Gathering
from headrace.engines.holds import Holds
from headrace.engines.kv_cache import BlockPool, block_digests, num_common
from headrace.engines.sequences import Sequence, SlotTable


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, stop) of a sequence, to be prefilled."""

    sequence: Sequence
    start: int
    stop: int
    only_logits: bool = False
    """Its one row lies in a block already that others may read: keys and values must not be written again."""


@dataclass(frozen=True, slots=True)
class Work:
    """One forward pass."""

    decode: np.ndarray
    """int64 slots that compute their last token."""
    chunks: list[Chunk]


@dataclass(slots=True)
class Counters:
    passes: int = 0
    """Forward passes, those without decoding rows included."""
    prompt_passes: int = 0
    """Passes with prompts in them."""
    prefill_tokens: int = 0
    cache_hit_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    forks: int = 0
    """Branches that found what they leave still held, under the weights that wrote it."""
    forks_stale: int = 0
    """Branches computed from their tokens because the weights have changed since."""
    forks_freed: int = 0
    """Branches computed from their tokens because what they leave was no longer held."""
    forked_tokens: int = 0
    """Tokens that branches did not have to prefill."""


@dataclass(slots=True)
class Scheduler:
    pool: BlockPool
    table: SlotTable
    holds: Holds
    prefill_tokens: int
    """Prompt tokens computed in one pass, at most."""
    gathering: Gathering
    counters: Counters = field(default_factory=Counters)
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    """In order of admission, the oldest first."""
    by_slot: dict[int, Sequence] = field(default_factory=dict)
    """The running sequences once more."""
    holding: bool = False
    """True while nothing new may start; what was started and preempted still comes back."""
    _filling: list[Sequence] = field(default_factory=list)
    """Running sequences that may have more than one token to compute, oldest first."""
    _slots: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def has_work(self) -> bool:
        return bool(self.running) or any(seq.started or not self.holding for seq in self.waiting)

    @property
    def num_started(self) -> int:
        """Sequences that run, or ran and were sent back."""
        return len(self.running) + sum(seq.started for seq in self.waiting)

    def next_work(self, versions: np.ndarray) -> Work:
        """``versions``: of the weights, by adapter."""
        decode = self._decoding()
        tenants, changes = self.table.tenant[decode], self.table.num_changes
        self._cover_decoding(decode, versions)
        chunks: list[Chunk] = []
        budget = self.prefill_tokens
        for sequence in list(self._filling):
            if budget > 0 and sequence.slot >= 0:
                budget -= self._add_chunk(sequence, budget, versions, chunks)
        self.gathering.is_open = self._are_ready(self.gathering.next_pass(len(decode)))
        num_begun = 0
        while budget > 0 and self._admit(versions, num_begun):
            budget -= self._add_chunk(self.running[-1], budget, versions, chunks)
            num_begun += 1
        self.gathering.is_open = self.gathering.is_open and budget <= 0
        if changes != self.table.num_changes:
            # Some may have been sent back meanwhile, and their slots given to others.
            decode = decode[self.table.tenant[decode] == tenants]
            chunks = [chunk for chunk in chunks if chunk.sequence.slot >= 0]
        return Work(decode, chunks)

    def finish(self, *sequences: Sequence) -> None:
        """Take running sequences out; their tokens are in their own arrays afterwards."""
        for sequence in sequences:
            del self.by_slot[sequence.slot]
            self.table.lift(sequence)
            self.pool.release(sequence.blocks)
            sequence.blocks = []
        self._slots = self._slots[self.table.tenant[self._slots] > 0]
        self.running = [sequence for sequence in self.running if sequence.slot >= 0]
        # One that is sent back may begin again in the same pass, and must not stand there twice.
        self._filling = [sequence for sequence in self._filling if sequence.slot >= 0]

    def hold(self, sequence: Sequence, version: int) -> None:
        """Hold what a running sequence that is about to finish has computed, if ``version`` wrote all of it."""
        if sequence.kv_version != version:
            return
        size, slot = self.table.block_size, sequence.slot
        token_ids = self.table.token_ids[slot, : int(self.table.booked[slot])].copy()
        num_rows = len(token_ids) - 1
        # While it decoded, the last block was found only when the next one was begun.
        self._publish(sequence, max(0, num_rows - size), num_rows, version)
        digests = block_digests(token_ids, size, sequence.digests, sequence.adapter)[: num_rows // size]
        self.holds.add(sequence.request, token_ids, digests, sequence.adapter)

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to wait; it keeps its tokens and loses its keys and values."""
        self.finish(sequence)
        self.waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _decoding(self) -> np.ndarray:
        """Slots with one token left to compute and another to draw, oldest first."""
        table, slots = self.table, self._slots
        self._filling = [
            sequence
            for sequence in self._filling
            if table.length[sequence.slot] - table.computed[sequence.slot] > 1
        ]
        # At its limit is a sequence whose last token is being computed.
        goes_on = table.length[slots] < table.limit[slots]
        if self._filling:
            goes_on &= table.length[slots] - table.computed[slots] == 1
        return slots if goes_on.all() else slots[goes_on]

    def _cover_decoding(self, decode: np.ndarray, versions: np.ndarray) -> None:
        """Give each decoding sequence a block for its token, and let others find the one it has filled."""
        if not len(decode):
            return
        row = self.table.computed[decode] & (self.table.block_size - 1)
        if row.min() > 0:
            return
        for sequence in [self.by_slot[slot] for slot in decode[row == 0].tolist()]:
            if sequence.slot < 0:  # An older one has taken its place just now.
                continue
            at, version = int(self.table.computed[sequence.slot]), int(versions[sequence.adapter])
            # All tokens of the block before this row are booked, even with a pass on its way.
            self._publish(sequence, at - 1, at, version)
            self._cover(sequence, at + 1, version)

    def _add_chunk(self, sequence: Sequence, budget: int, versions: np.ndarray, chunks: list[Chunk]) -> int:
        """Schedule the next rows of a prompt; returns how many."""
        version = int(versions[sequence.adapter])
        is_all_there = self._match(sequence, version)
        start, length = int(self.table.computed[sequence.slot]), int(self.table.length[sequence.slot])
        covered = self._cover(sequence, min(start + budget, length), version)
        if covered <= start:
            return 0
        chunks.append(Chunk(sequence, start, covered, only_logits=is_all_there))
        self._publish(sequence, start, covered, version)
        return covered - start

    def _admit(self, versions: np.ndarray, num_begun: int) -> bool:
        """Start the next waiting sequence if a slot and the blocks of its tokens are there, and one more to grow for
        each that began in the same pass."""
        if not self.waiting or not self.table.num_free or not self.gathering.is_open:
            return False
        sequence = self.waiting[0]
        if not sequence.started and (self.holding or not self._has_room_for_siblings(sequence)):
            return False
        if self.running and not self._fit(sequence, reserved=num_begun):
            return False
        self.waiting.popleft()
        self.table.place(sequence)
        self.gathering.began()
        sequence.started, sequence.kv_version = True, int(versions[sequence.adapter])
        self.running.append(sequence)
        self.by_slot[sequence.slot] = sequence
        self._filling.append(sequence)
        self._slots = np.append(self._slots, sequence.slot)
        return True

    def _are_ready(self, count: int) -> bool:
        """Whether so many sequences wait that have slots and blocks. Branches are not gathered: what they leave is of
        use only until the weights change. Nor is what comes back while nothing new may start."""
        head = self.waiting[0] if self.waiting else None
        is_branch = head is not None and not head.started and head.request.fork is not None
        if not count or self.holding or is_branch:
            return True
        if min(len(self.waiting), self.table.num_free) < count:
            return False
        return self._fit(*islice(self.waiting, count))

    def _fit(self, *sequences: Sequence, reserved: int = 0) -> bool:
        """Whether there are blocks for their tokens and the next one of each. Blocks that others hold, or that two in a
        row begin with, are shared."""
        free, size = self.pool.num_free - reserved, self.table.block_size
        needed = [len(sequence.token_ids) // size + 1 for sequence in sequences]
        if sum(needed) <= free:
            return True
        before: list[bytes] = []
        for sequence, most in zip(sequences, needed, strict=True):
            num_shareable = self._num_shareable(len(sequence.token_ids))
            digests = block_digests(sequence.token_ids, size, sequence.digests, sequence.adapter)
            digests = digests[:num_shareable]
            free -= most - max(num_common(before, digests), self.pool.num_held(digests))
            if free < 0:
                return False
            before = digests
        return True

    def _has_room_for_siblings(self, sequence: Sequence) -> bool:
        """True when every branch that waits to leave at the same point can start now, or all slots are free."""
        fork = sequence.request.fork
        if fork is None:
            return True
        num_siblings = sum(other.request.fork == fork and not other.started for other in self.waiting)
        return self.table.num_free >= min(num_siblings, len(self.table.length))

    def _match(self, sequence: Sequence, version: int) -> bool:
        """Take over computed blocks. True: they hold all rows, of which the last counts as not computed, since its
        logits are needed."""
        table, size, slot = self.table, self.table.block_size, sequence.slot
        length, at = int(table.length[slot]), int(table.computed[slot])
        if at != len(sequence.blocks) * size or sequence.kv_version != version:
            return False
        digests = block_digests(table.token_ids[slot, :length], size, sequence.digests, sequence.adapter)
        found = self.pool.share(digests[at // size : self._num_shareable(length)])
        self._give(sequence, found)
        num_found = at + len(found) * size
        start, at = at, min(num_found, length - 1)
        table.row_versions[slot, start:at] = version
        table.computed[slot] = at
        self.counters.cache_hit_tokens += at - start
        if sequence.fork_unseen:
            self._note_fork(sequence, at, version)
        return num_found == length

    def _num_shareable(self, num_tokens: int) -> int:
        """Leading blocks of a sequence that may be another's. Routes are kept where keys and values are, and those of
        the last token must be of the pass whose logits are drawn from: its block is then the sequence's own."""
        is_recorded = self.table.routes is not None
        return (num_tokens - is_recorded) // self.table.block_size

    def _note_fork(self, sequence: Sequence, num_found: int, version: int) -> None:
        """Count a branch once, when it starts."""
        fork, counters = sequence.request.fork, self.counters
        assert fork is not None
        sequence.fork_unseen = False
        if fork.version != version:
            counters.forks_stale += 1
        elif fork.request_id not in self.holds:
            counters.forks_freed += 1
        else:
            counters.forks += 1
            counters.forked_tokens += min(num_found, fork.num_tokens)

    def _cover(self, sequence: Sequence, num_rows: int, version: int) -> int:
        """Give the sequence blocks for its first ``num_rows`` rows; returns how many rows it can hold.
        Younger sequences are sent back for it, and itself if it decodes and is the youngest."""
        size = self.table.block_size
        while len(sequence.blocks) * size < num_rows:
            block = self.pool.allocate(version, sequence.adapter)
            if block is not None:
                self._give(sequence, [block])
            elif (youngest := self.running[-1]) is not sequence:
                self.preempt(youngest)
            else:
                break
        held = len(sequence.blocks) * size
        if held <= self.table.computed[sequence.slot]:
            self.preempt(sequence)
            return 0
        return min(held, num_rows)

    def _give(self, sequence: Sequence, blocks: list[int]) -> None:
        before = len(sequence.blocks)
        sequence.blocks += blocks
        self.table.blocks[sequence.slot, before : len(sequence.blocks)] = blocks

    def _publish(self, sequence: Sequence, start: int, stop: int, version: int) -> None:
        """Let others find the blocks that rows [start, stop) fill.

        Rows computed while older rows of the same sequence date from other weights carry these along,
        so the whole sequence must be of this version, not the block alone."""
        size, slot = self.table.block_size, sequence.slot
        if slot < 0 or sequence.kv_version != version or stop // size == start // size:
            return
        digests = block_digests(self.table.token_ids[slot, :stop], size, sequence.digests, sequence.adapter)
        for i in range(start // size, stop // size):
            self.pool.publish(sequence.blocks[i], digests[i], version)
