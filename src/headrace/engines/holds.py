"""Finished requests whose key-value blocks are held, so that branches can leave them without a new prefill.

In: what a finished request has computed, for how long it is wanted, and what the weights are. Out: pins in the block
pool. A hold ends when it is released, when its deadline passes, when the weights it was computed with change (what
they wrote is of no use to anybody new), or when memory is short: holds are given up before any running request is,
the oldest first, and counted. Its blocks are then ordinary cached ones, so a fork may still find them for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from headrace.engines.kv_cache import BlockPool
from headrace.errors import ForkError
from headrace.types import Request


@dataclass(frozen=True, slots=True)
class Hold:
    token_ids: np.ndarray
    """int32, prompt and everything sampled."""
    blocks: list[int]
    """Those its tokens fill."""
    adapter: int
    deadline: float


class Holds:
    def __init__(self, pool: BlockPool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._held: dict[str, Hold] = {}
        """The oldest first."""
        self._next_deadline = float("inf")
        self.num_given_up = 0
        self.num_expired = 0
        pool.give_up = self._give_up

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def add(self, request: Request, token_ids: np.ndarray, digests: list[bytes], adapter: int) -> None:
        """Hold the blocks with these contents for as long as the request asks."""
        self.release((request.id,))
        deadline = self._clock() + request.hold_s
        self._held[request.id] = Hold(token_ids, self._pool.pin(digests), adapter, deadline)
        self._next_deadline = min(self._next_deadline, deadline)

    def release(self, request_ids: Iterable[str]) -> None:
        """These are not needed any more; ids that are not here are ignored."""
        for request_id in request_ids:
            hold = self._held.pop(request_id, None)
            if hold is not None:
                self._pool.unpin(hold.blocks)

    def expire(self) -> None:
        """End what is past its deadline."""
        if not self._held or self._clock() < self._next_deadline:
            return
        now = self._clock()
        late = [name for name, hold in self._held.items() if hold.deadline <= now]
        self.num_expired += len(late)
        self.release(late)
        self._next_deadline = min((hold.deadline for hold in self._held.values()), default=float("inf"))

    def forget(self, adapter: int) -> None:
        """The adapter's weights changed: what was computed with the old ones is held for nobody."""
        self.release([name for name, hold in self._held.items() if hold.adapter == adapter])

    def check(self, request: Request) -> None:
        """Raise ForkError if the request cannot be a branch of what it says; a request that is held no more is
        no error, since its tokens can be computed again."""
        fork = request.fork
        if fork is None:
            return
        num_prompt = len(request.prompt_ids)
        if not 0 < fork.num_tokens <= num_prompt:
            raise ForkError(
                f"request {request.id!r} leaves {fork.request_id!r} after {fork.num_tokens} tokens, but its prompt has "
                f"{num_prompt}: the prompt must hold everything up to the fork."
            )
        hold = self._held.get(fork.request_id)
        common = slice(0, fork.num_tokens)
        if hold is not None and not np.array_equal(hold.token_ids[common], request.prompt_ids[common]):
            raise ForkError(
                f"request {request.id!r} does not begin with the first {fork.num_tokens} tokens of "
                f"{fork.request_id!r}, which it is said to leave: give the tokens of that request as its prompt."
            )

    def _give_up(self) -> None:
        self.num_given_up += 1
        self.release((next(iter(self._held)),))
