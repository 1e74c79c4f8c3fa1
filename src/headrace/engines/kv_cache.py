"""Which key-value blocks are used, shared or free.

In: requests for blocks, and digests of the tokens a block holds (chained over everything before it).
Out: block ids. Block 0 is never given out: padding is written there. A block is in exactly one place:
in use (reference count above zero), kept (count zero, pinned by a hold), cached (count zero, found by its digest),
or free. Pins give way when every other block is in use: ``allocate`` then has ``give_up`` take some away. Blocks that
are let go of are put away when the next one is asked for, or in a quiet moment (``tidy``): hundreds of requests may end
in one pass, and what they sampled must not wait for their blocks.

A block's version is that of its oldest row. Only full blocks written wholly under the current version
are found by digest; ``forget`` makes every block unfindable that was computed with the weights that change.
Digests of one adapter's blocks never meet those of another's.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np

SCRATCH_BLOCK = 0


def block_digests(
    token_ids: np.ndarray, block_size: int, known: list[bytes], adapter: int = 0
) -> list[bytes]:
    """``known`` extended to every full block of the tokens; each digest covers the adapter they are computed with
    and all tokens before it."""
    digests = known
    tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
    for start in range(len(digests) * block_size, len(tokens) - block_size + 1, block_size):
        parent = digests[-1] if digests else adapter.to_bytes(2, "little")
        block = tokens[start : start + block_size].tobytes()
        digests.append(hashlib.blake2b(parent + block, digest_size=16).digest())
    return digests


def num_common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Blocks that both begin with. Digests are chained, so where two agree all before them do."""
    shorter = range(min(len(one), len(other)))
    return bisect_left(shorter, True, key=lambda i: one[i] != other[i])


class BlockPool:
    """Reference-counted blocks with a cache of those that can still be found by content."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "one block is scratch, so a pool needs at least two"
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))
        self._counts = [0] * num_blocks
        self._versions = [-1] * num_blocks
        self._adapters = [0] * num_blocks
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._leaving: list[list[int]] = []
        """Blocks that were let go of and still count as held."""
        self._pins = [0] * num_blocks
        self._kept: set[int] = set()
        self.give_up: Callable[[], None] = lambda: None
        """Takes away the pins that are needed least; set by whoever pins."""

    @property
    def capacity(self) -> int:
        """Blocks that can be held at once."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can give, cached and kept ones included."""
        self.tidy()
        return len(self._free) + len(self._idle) + len(self._kept)

    def allocate(self, version: int, adapter: int = 0) -> int | None:
        """A block that is about to be written under ``version`` of an adapter; None when every block is in use."""
        self.tidy()
        while self._kept and not (self._free or self._idle):
            self.give_up()
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._unlist(block)
        else:
            return None
        self._counts[block] = 1
        self._versions[block] = version
        self._adapters[block] = adapter
        return block

    def publish(self, block: int, digest: bytes, version: int) -> None:
        """The block is full: let others find it, if it was written wholly under ``version``."""
        if self._versions[block] == version and digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def share(self, digests: Sequence[bytes]) -> list[int]:
        """Hold the blocks with these contents once more; ends at the first that is not there."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            if not self._counts[block]:
                self._idle.pop(block, None)
                self._kept.discard(block)
            self._counts[block] += 1
            blocks.append(block)
        return blocks

    def num_held(self, digests: Sequence[bytes]) -> int:
        """Blocks with these contents, from the first on, that somebody holds: to share them takes no free one."""
        held = (self._counts[self._block_of.get(digest, SCRATCH_BLOCK)] for digest in digests)
        return sum(1 for _ in takewhile(bool, held))

    def release(self, blocks: list[int]) -> None:
        """Let go of blocks, the last first, so that a chain is evicted from its end. The list is not to change."""
        self._leaving.append(blocks)

    def tidy(self) -> None:
        """Put away what was let go of."""
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, []
        counts = self._counts
        for blocks in leaving:
            for block in reversed(blocks):
                counts[block] -= 1
                if counts[block] <= 0:
                    assert counts[block] == 0, f"block {block} was released more often than held"
                    self._put_away(block)

    def pin(self, digests: Sequence[bytes]) -> list[int]:
        """Keep the blocks with these contents findable while nobody uses them; ends at the first that is not there."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            self._pins[block] += 1
            if block in self._idle:
                del self._idle[block]
                self._kept.add(block)
            blocks.append(block)
        return blocks

    def unpin(self, blocks: Sequence[int]) -> None:
        """Take back what ``pin`` did, the last block first."""
        for block in reversed(blocks):
            self._pins[block] -= 1
            assert self._pins[block] >= 0, f"block {block} was unpinned more often than pinned"
            if block in self._kept and not self._pins[block]:
                self._kept.discard(block)
                self._put_away(block)

    def is_findable(self, block: int) -> bool:
        return block in self._digest_of

    def forget(self, adapter: int = 0) -> None:
        """No block written so far with this adapter may be found again: its weights changed."""
        adapters = self._adapters
        if {adapters[block] for block in self._digest_of} <= {adapter}:
            # As ever where there is one policy. One by one they take a moment, for which everybody would wait.
            self._free += self._idle
            for findable in (self._digest_of, self._block_of, self._idle):
                findable.clear()
            return
        for block in [block for block in self._digest_of if adapters[block] == adapter]:
            self._unlist(block)
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def _put_away(self, block: int) -> None:
        """Where a block goes when somebody has let go of it."""
        if self._counts[block]:
            return
        if self._pins[block]:
            self._kept.add(block)
        elif block in self._digest_of:
            self._idle[block] = None
        else:
            self._free.append(block)

    def _unlist(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]
