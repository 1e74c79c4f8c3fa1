"""An engine that missed an update gets all weights, while the trainer publishes the same version for everybody."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.errors import WeightSyncError
from headrace.runtime.weight_sync import WeightSync
from headrace.types import TensorBlob
from headrace.weights.files import FilesReceiver, FilesSender
from headrace.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender

WAIT_S = 30.0
ENDS = {
    "files": (FilesSender, FilesReceiver),
    "shared memory": (SharedMemorySender, SharedMemoryReceiver),
}


def blobs(version):
    return [TensorBlob(name="w", dtype="U8", shape=(4096,), data=np.full(4096, version, np.uint8))]


class Trainer:
    def __init__(self, sender):
        self.version, self.sender = 1, sender

    async def publish(self, version):
        return self.sender.send(version, blobs(version))

    async def publish_whole(self):
        # The step that ran meanwhile is over.
        self.version = 2
        return self.sender.send(self.version, blobs(self.version), kind="full")

    async def retire(self, version):
        self.sender.retire(version)


class Engine:
    """Fails the first update, and is slow to read the one that makes up for it."""

    name = "engine-0"

    def __init__(self, receiver):
        self.receiver, self.held, self.num_calls = receiver, None, 0
        self.catching_up, self.may_read = asyncio.Event(), asyncio.Event()

    async def begin_update(self, mode): ...

    async def cancel_update(self): ...

    async def apply(self, manifest):
        self.num_calls += 1
        if self.num_calls == 1:
            raise WeightSyncError("torn once")
        self.catching_up.set()
        await self.may_read.wait()
        (blob,) = self.receiver.receive(manifest)
        self.held = int(np.frombuffer(blob.data, np.uint8)[0])
        return manifest.version


class Ahead(Engine):
    """Refuses what is older than what it has, as engines do."""

    async def apply(self, manifest):
        if self.held is not None and manifest.version < self.held:
            raise WeightSyncError(f"{manifest.version} is older")
        return await super().apply(manifest)


@pytest.mark.parametrize("mode", ["never", "block", "drain"])
def test_updates_that_an_engine_is_ahead_of_pass_it_by(tmp_path, mode):
    sender = FilesSender(tmp_path / "weights")

    async def main():
        engine, warnings, trainer = Ahead(FilesReceiver()), [], Trainer(sender)
        engine.may_read.set()
        sync = WeightSync(
            [engine],
            trainer,
            mode=mode,
            deadline_s=WAIT_S,
            drain_s=WAIT_S,
            step_s=WAIT_S,
            warn=warnings.append,
        )
        first = await sync.publish(0)
        second = await sync.publish(1)
        await sync.land(first)
        assert engine.held == 2
        num_calls = engine.num_calls
        await sync.land(second)
        await sync.land(await sync.publish(2))
        assert engine.num_calls == num_calls and len(warnings) == 1
        await sync.land(await sync.publish(3))
        assert engine.held == 3 and sync.version == 3

    try:
        asyncio.run(asyncio.wait_for(main(), WAIT_S))
    finally:
        sender.close()


class Pausing(Ahead):
    """Pauses when it is told to, until an update arrives or it is told to go on."""

    def __init__(self, receiver):
        super().__init__(receiver)
        self.is_paused, self.num_pauses = False, 0

    async def begin_update(self, mode):
        self.is_paused, self.num_pauses = True, self.num_pauses + 1

    async def cancel_update(self):
        self.is_paused = False

    async def apply(self, manifest):
        version = await super().apply(manifest)
        self.is_paused = False
        return version


class Watching(Trainer):
    """Whether the engine is paused while all weights are asked for."""

    def __init__(self, sender, engine):
        super().__init__(sender)
        self.engine, self.paused = engine, []

    async def publish_whole(self):
        self.paused.append(self.engine.is_paused)
        return await super().publish_whole()


def pausing(sender, mode):
    engine = Pausing(FilesReceiver())
    trainer = Watching(sender, engine)
    sync = WeightSync([engine], trainer, mode=mode, deadline_s=WAIT_S, drain_s=WAIT_S, step_s=WAIT_S)
    return sync, engine, trainer


@pytest.mark.parametrize("mode", ["block", "drain"])
def test_nobody_pauses_for_what_takes_a_step_or_passes_it_by(tmp_path, mode):
    """The trainer may be in the middle of a step when it is asked for all weights."""
    sender = FilesSender(tmp_path / "weights")

    async def main():
        sync, engine, trainer = pausing(sender, mode)
        engine.may_read.set()
        await sync.land(await sync.publish(1))
        assert engine.held == 2 and trainer.paused == [False] and not engine.is_paused
        num_pauses = engine.num_pauses
        await sync.land(await sync.publish(2))
        assert engine.num_pauses - num_pauses == (mode == "block") and not engine.is_paused

    try:
        asyncio.run(asyncio.wait_for(main(), WAIT_S))
    finally:
        sender.close()


@pytest.mark.parametrize("mode", ["block", "drain"])
def test_a_landing_that_is_given_up_leaves_no_engine_paused(tmp_path, mode):
    sender = FilesSender(tmp_path / "weights")

    async def main():
        sync, engine, _ = pausing(sender, mode)
        engine.num_calls = 1
        landing = asyncio.ensure_future(sync.land(await sync.publish(1)))
        await engine.catching_up.wait()
        assert engine.is_paused
        landing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await landing
        assert not engine.is_paused

    try:
        asyncio.run(asyncio.wait_for(main(), WAIT_S))
    finally:
        sender.close()


def test_engines_are_blocked_for_the_next_update_after_the_last_has_landed(tmp_path):
    """Otherwise its arrival would let them go on while the next is copied out."""
    sender = FilesSender(tmp_path / "weights")

    async def main():
        sync, engine, _ = pausing(sender, "block")
        engine.num_calls = 1
        landing = asyncio.ensure_future(sync.land(await sync.publish(1)))
        await engine.catching_up.wait()
        publishing = asyncio.ensure_future(sync.publish(2))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not publishing.done() and engine.num_pauses == 1
        engine.may_read.set()
        await landing
        second = await publishing
        assert engine.num_pauses == 2 and engine.is_paused
        await sync.land(second)
        assert engine.held == 2 and not engine.is_paused

    try:
        asyncio.run(asyncio.wait_for(main(), WAIT_S))
    finally:
        sender.close()


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_what_one_engine_catches_up_with_is_there_until_it_is_retired(ends, tmp_path):
    make_sender, make_receiver = ends
    sender = make_sender(tmp_path / "weights")

    async def main():
        engine, warnings = Engine(make_receiver()), []
        sync = WeightSync(
            [engine], Trainer(sender), mode="never", deadline_s=WAIT_S, drain_s=WAIT_S, step_s=WAIT_S,
            warn=warnings.append,
        )  # fmt: skip
        landing = asyncio.ensure_future(sync.land(await sync.publish(1)))
        await engine.catching_up.wait()
        next_update = await sync.publish(2)
        engine.may_read.set()
        await landing
        assert engine.held == 2 and len(warnings) == 1
        await sync.land(next_update)
        assert sync.version == 2
        await sync.retire(2)

    try:
        asyncio.run(asyncio.wait_for(main(), WAIT_S))
    finally:
        sender.close()
