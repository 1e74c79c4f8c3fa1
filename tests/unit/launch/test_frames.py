"""Frames come out whole and in order, however the stream is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from headrace.launch.frames import LENGTH, READ_AHEAD_BYTES, ChannelClosed, FrameProtocol


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.paused = self.aborted = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def abort(self) -> None:
        self.aborted = True


def connected(**kwargs: Any) -> tuple[FrameProtocol, FakeTransport]:
    frames, transport = FrameProtocol(**kwargs), FakeTransport()
    frames.connection_made(transport)
    return frames, transport


def feed(frames: FrameProtocol, data: bytes, *, at_once: int) -> None:
    """As a transport reads: never more than there is room for."""
    while data:
        room = frames.get_buffer(-1)
        count = min(len(room), len(data), at_once)
        room[:count] = data[:count]
        data = data[count:]
        frames.buffer_updated(count)


def framed(*bodies: bytes) -> bytes:
    return b"".join(LENGTH.pack(len(body)) + body for body in bodies)


def run(use: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await use

    asyncio.run(main())


BODIES = [b"", b"a", bytes(range(256)) * 700, b"bc" * 5, b"", bytes(65_528), bytes(65_529), b"end"]


@pytest.mark.parametrize("at_once", [1, 7, 8, 4096, 65_536, 10**6])
def test_frames_are_whole_however_the_stream_is_cut(at_once):
    async def use() -> None:
        bodies = BODIES if at_once > 1 else [b"", b"a", b"bc" * 50, b"end"]
        frames, _ = connected()
        feed(frames, framed(*bodies), at_once=at_once)
        assert [bytes(await frames.receive()) for _ in bodies] == bodies

    run(use())


def test_whoever_waits_is_woken_by_a_frame_and_by_the_end():
    async def use() -> None:
        frames, _ = connected()
        waiting = asyncio.create_task(frames.receive())
        await asyncio.sleep(0)
        feed(frames, framed(b"late"), at_once=3)
        assert bytes(await waiting) == b"late"
        waiting = asyncio.create_task(frames.receive())
        await asyncio.sleep(0)
        frames.connection_lost(None)
        with pytest.raises(ChannelClosed):
            await waiting

    run(use())


def test_what_came_before_the_end_is_still_received_and_half_a_frame_is_not():
    async def use() -> None:
        frames, _ = connected()
        feed(frames, framed(b"one", b"two") + framed(b"torn")[:-1], at_once=100)
        frames.connection_lost(ConnectionResetError())
        assert [bytes(await frames.receive()) for _ in range(2)] == [b"one", b"two"]
        with pytest.raises(ChannelClosed):
            await frames.receive()

    run(use())


def test_reading_pauses_while_nobody_takes_what_was_read():
    async def use() -> None:
        frames, transport = connected()
        body = bytes(READ_AHEAD_BYTES // 2 + 1)
        feed(frames, framed(body), at_once=1 << 20)
        assert not transport.paused
        feed(frames, framed(body), at_once=1 << 20)
        assert transport.paused
        await frames.receive()
        assert not transport.paused

    run(use())


def test_only_the_first_frame_is_limited():
    async def use() -> None:
        frames, transport = connected(max_first_bytes=10)
        feed(frames, framed(bytes(10), bytes(11)), at_once=100)
        assert not transport.aborted
        assert len(await frames.receive()) == 10
        frames.accept()
        assert len(await frames.receive()) == 11
        frames, transport = connected(max_first_bytes=10)
        feed(frames, LENGTH.pack(11), at_once=100)
        assert transport.aborted

    run(use())


@pytest.mark.parametrize("at_once", [7, 100])
def test_nothing_behind_the_first_frame_is_looked_at_before_it_is_accepted(at_once):
    async def use() -> None:
        frames, transport = connected(max_first_bytes=10)
        # No machine has the memory that the second frame asks for.
        feed(frames, framed(b"hello") + LENGTH.pack(1 << 60), at_once=at_once)
        assert transport.paused and not transport.aborted
        assert bytes(await frames.receive()) == b"hello"
        assert transport.paused, "taking the first frame accepts nobody"
        frames, transport = connected(max_first_bytes=10)
        feed(frames, framed(b"hello", b"", bytes(20)), at_once=100)
        frames.accept()
        assert not transport.paused
        assert [len(await frames.receive()) for _ in range(3)] == [5, 0, 20]

    run(use())
