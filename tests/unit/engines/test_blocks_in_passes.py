"""What passes write and read of the block pool, whatever the scheduler is given: each row of a block is written once
while it belongs to somebody, and whoever reads it finds what its own tokens make it, by the weights it believes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.engines.kv_cache import BlockPool
from headrace.engines.sampler import Drawn
from headrace.engines.scheduler import Work
from headrace.engines.sequences import SlotTable
from headrace.engines.torch_engine import TorchEngine
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import ForkPoint, Request, Sampling

SIZE = 4
VOCAB = 30


class Held:
    """Weights of which nothing is computed."""

    num_adapters = 0

    def load(self, updates: Any) -> None: ...


class Flight:
    def __init__(self, slots: list[int], token_ids: list[int]) -> None:
        self.slots, self.routed = np.array(slots, dtype=np.int64), []
        self._token_ids = np.array(token_ids, dtype=np.int64)

    def wait(self) -> Drawn:
        return Drawn(self._token_ids, np.full(len(self._token_ids), -1.0, dtype=np.float32), {})


class WatchedPool(BlockPool):
    """Knows of each block what its rows hold since it was given out: a hash of all tokens up to there, and the version
    of the weights."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.written: dict[int, dict[int, tuple[int, int]]] = {}

    def allocate(self, version: int, adapter: int = 0) -> int | None:
        block = super().allocate(version, adapter)
        if block is not None:
            self.written[block] = {}
        return block


class WatchingExecutor:
    """Computes nothing, and looks at what it would have written and read."""

    limit_tokens = 60
    vocab_size = VOCAB

    def __init__(self, chance: random.Random, *, num_blocks: int, pipelined: bool) -> None:
        self.table = SlotTable(6, SIZE)
        self.num_blocks = num_blocks
        self.pipelined = self.prompts_apart = pipelined
        self.held = Held()
        self.pool = WatchedPool(num_blocks)
        self.version = 0
        self._chance = chance
        self._on_their_way: dict[int, int] = {}
        """By tenant, the token drawn last."""

    def launch(self, work: Work) -> Flight:
        table = self.table
        read = []
        for slot in work.decode.tolist():
            start = int(table.computed[slot])
            self._write(slot, start)
            read.append((slot, start, start + 1))
        for chunk in work.chunks:
            slot = chunk.sequence.slot
            assert chunk.start == table.computed[slot] < chunk.stop
            if chunk.only_logits:
                assert chunk.stop - chunk.start == 1 and chunk.stop == table.length[slot]
                self._check(slot, chunk.start, self.version)
            else:
                for position in range(chunk.start, chunk.stop):
                    self._write(slot, position)
            read.append((slot, chunk.start, chunk.stop))
        # Within a layer all keys and values of a pass are written before any are read.
        for slot, start, _ in read:
            for position in range(start):
                self._check(slot, position, int(table.row_versions[slot, position]))
        drawing = [slot for slot, _, stop in read if stop == table.length[slot]]
        token_ids = [self._chance.randrange(VOCAB) for _ in drawing]
        self._on_their_way |= dict(zip(table.tenant[drawing].tolist(), token_ids, strict=True))
        return Flight(drawing, token_ids)

    def _write(self, slot: int, position: int) -> None:
        rows = self._rows(slot, position)
        assert position % SIZE not in rows, "written again"
        rows[position % SIZE] = self._content(slot, position), self.version

    def _check(self, slot: int, position: int, version: int) -> None:
        found = self._rows(slot, position).get(position % SIZE)
        assert found == (self._content(slot, position), version), "read before it was written, or another's"

    def _rows(self, slot: int, position: int) -> dict[int, tuple[int, int]]:
        return self.pool.written[int(self.table.blocks[slot, position // SIZE])]

    def _content(self, slot: int, position: int) -> int:
        """Of the row's token and all before it, the last of which may still be on its way to the host."""
        num_booked = int(self.table.booked[slot])
        token_ids = self.table.token_ids[slot, : min(position + 1, num_booked)].tolist()
        if position >= num_booked:
            assert position == num_booked
            token_ids.append(self._on_their_way[int(self.table.tenant[slot])])
        return hash(tuple(token_ids))


def make_engine(chance: random.Random, *, pipelined: bool) -> tuple[TorchEngine, WatchingExecutor]:
    executor = WatchingExecutor(chance, num_blocks=chance.choice((18, 30, 60)), pipelined=pipelined)
    engine = TorchEngine(
        executor,  # type: ignore[arg-type]
        ledger=TimeLedger(ENGINE_ACTIVITIES),
        prefill_tokens=chance.choice((3, 16, 100)),
        recompute_kv=chance.random() < 0.3,
    )
    # The engine's own, watched: everything that is given out passes here.
    engine._pool = engine._scheduler.pool = engine._holds._pool = executor.pool
    executor.pool.give_up = engine._holds._give_up
    return engine, executor


def requests(chance: random.Random, number: int) -> list[Request]:
    """A group with one prompt, often one that fills its blocks."""
    length = chance.choice((SIZE, 2 * SIZE, 3 * SIZE, 4 * SIZE, chance.randint(1, 20)))
    # Few different ones, so that groups find blocks of others.
    prompt = np.full(length, chance.randrange(2), dtype=np.int32)
    sampling = Sampling(max_tokens=chance.randint(1, 25))
    hold_s = 60.0 if chance.random() < 0.3 else 0.0
    return [
        Request(id=f"{number}/{i}", prompt_ids=prompt, sampling=sampling, seed=i, hold_s=hold_s)
        for i in range(chance.randint(1, 5))
    ]


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_rows_are_written_once_and_read_by_those_whose_they_are(seed: int, pipelined: bool) -> None:
    chance = random.Random(seed)
    engine, executor = make_engine(chance, pipelined=pipelined)
    version, waiting, done = 0, 12, {}
    known: dict[str, Request] = {}
    for step in range(3000):
        is_unruly = step < 400
        if waiting and chance.random() < 0.15:
            waiting -= 1
            for request in requests(chance, waiting):
                known[request.id] = request
                engine.submit(request)
        if is_unruly and chance.random() < 0.02:
            version += 1
            engine.apply(version, [])
            executor.version = version
        if is_unruly and done and chance.random() < 0.05:
            # A branch of something finished, cut off where it may fill its blocks.
            root = known[chance.choice(sorted(done))]
            whole = np.concatenate((root.prompt_ids, done[root.id].token_ids)).astype(np.int32)
            cut = chance.randint(1, len(whole))
            fork = ForkPoint(request_id=root.id, num_tokens=cut, version=version)
            branch = replace(root, id=f"branch {step}", prompt_ids=whole[:cut], fork=fork, hold_s=0.0)
            if cut < executor.limit_tokens:
                engine.submit(branch)
        if is_unruly and known and chance.random() < 0.03:
            name = chance.choice(sorted(known))
            for _, part in engine.abort([name]):
                # It goes on from what it has.
                engine.submit(replace(known[name], prefix=part))
        done |= {name: completion for name, completion in engine.step() if name in known}
        if not waiting and not engine.has_work:
            break
    assert not engine.has_work and set(known) <= set(done)
    assert executor.pool.num_free == executor.pool.capacity
