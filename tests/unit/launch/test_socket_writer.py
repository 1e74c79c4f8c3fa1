"""Bytes go out in order whether or not an event loop turns, and end with the connection."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.launch import channel as channels
from headrace.launch import socket_writer as module
from headrace.launch.channel import Listener, open_channel
from headrace.launch.socket_writer import SocketWriter

MORE_THAN_IT_HOLDS = 32 << 20
DEADLINE_S = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[SocketWriter, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(DEADLINE_S)
    writer = SocketWriter(ours)
    yield writer, theirs
    writer.end()
    theirs.close()


def read(connection: socket.socket, num_bytes: int) -> bytes:
    read = bytearray()
    while len(read) < num_bytes:
        piece = connection.recv(num_bytes - len(read))
        if not piece:
            break
        read += piece
    return bytes(read)


def wait_empty(writer: SocketWriter) -> None:
    due = time.monotonic() + DEADLINE_S
    while writer.backlog_bytes:
        assert time.monotonic() < due, "the backlog was not worked off"
        time.sleep(0.001)


def numbered(number: int, num_bytes: int) -> bytes:
    return (number.to_bytes(4, "big") * (num_bytes // 4 + 1))[:num_bytes]


def test_pieces_of_any_size_arrive_whole_and_in_order(ends: tuple[SocketWriter, socket.socket]) -> None:
    writer, other = ends
    pieces = [numbered(i, size) for i, size in enumerate((1, 100, MORE_THAN_IT_HOLDS, 0, 7, 1 << 20, 3))]
    for piece in pieces:
        writer.write(piece)
    assert writer.backlog_bytes > 0
    assert read(other, sum(map(len, pieces))) == b"".join(pieces)
    wait_empty(writer)
    assert writer.backlog_bytes == 0
    writer.write(b"once more")
    assert read(other, 9) == b"once more"


def test_what_fits_needs_no_thread(ends: tuple[SocketWriter, socket.socket]) -> None:
    writer, other = ends
    before = threading.active_count()
    writer.write(b"small")
    assert threading.active_count() == before and writer.backlog_bytes == 0
    wait_empty(writer)
    assert read(other, 5) == b"small"


def test_the_end_leaves_nothing_behind(ends: tuple[SocketWriter, socket.socket]) -> None:
    writer, other = ends
    writer.write(bytes(MORE_THAN_IT_HOLDS))
    writer.end()
    wait_empty(writer)
    assert writer.backlog_bytes == 0
    assert len(read(other, MORE_THAN_IT_HOLDS)) < MORE_THAN_IT_HOLDS, "the connection is shut down"
    writer.write(b"too late")
    assert writer.backlog_bytes == 0
    writer.end()


def test_what_nobody_reads_any_more_is_lost(ends: tuple[SocketWriter, socket.socket]) -> None:
    writer, other = ends
    writer.write(bytes(MORE_THAN_IT_HOLDS))
    other.close()
    wait_empty(writer)
    writer.write(b"nobody hears this")
    assert writer.backlog_bytes == 0


class Refusing(socket.socket):
    """Takes so many pieces, then one is refused."""

    num_taken = 1

    def send(self, data: object, flags: int = 0) -> int:
        self.num_taken -= 1
        if self.num_taken == -1:
            raise OSError(errno.ENOBUFS, "no buffer space available")
        return super().send(data, flags)


def test_nothing_follows_what_could_not_be_sent() -> None:
    ours, theirs = socket.socketpair()
    refusing = Refusing(fileno=ours.detach())
    refusing.setblocking(False)
    theirs.settimeout(DEADLINE_S)
    writer = SocketWriter(refusing)
    for piece in (b"first", b"refused", b"after"):
        writer.write(piece)
    assert read(theirs, 100) == b"first", "the other end reads no frame that lacks its beginning"
    writer.end()
    theirs.close()


def test_a_thread_that_fails_ends_the_connection(
    ends: tuple[SocketWriter, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(module, "_Selector", refuse)
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    writer, other = ends
    writer.write(bytes(MORE_THAN_IT_HOLDS))
    wait_empty(writer)
    assert len(read(other, MORE_THAN_IT_HOLDS)) < MORE_THAN_IT_HOLDS
    for thread in threading.enumerate():
        if thread.name == "socket writer":
            thread.join(DEADLINE_S)
    assert len(told) == 1


def test_messages_leave_while_the_event_loop_is_busy(tmp_path: Path) -> None:
    """As an engine's is for the length of a pass."""
    received: list[int] = []

    async def read_all(address: str, token: str) -> None:
        channel = await open_channel(address)
        channel.post(["hello", "reader", token])
        for _ in range(400):
            received.append(len(await channel.receive()))
        await channel.close()

    async def write_all() -> None:
        listener = Listener()
        await listener.open(tmp_path)
        arrival = listener.expect("reader")
        reading = read_all(listener.address, listener.token)
        thread = threading.Thread(target=asyncio.run, args=(reading,), daemon=True)
        thread.start()
        channel = await arrival
        for _ in range(400):
            channel.post("x" * 40_000)
        await asyncio.sleep(0)
        # From here on nobody gives the event loop a turn.
        thread.join(DEADLINE_S)
        assert received == [40_000] * 400
        await channel.close()
        listener.close()

    asyncio.run(write_all())


def test_closing_does_not_wait_for_ever_for_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_CLOSE_DEADLINE_S", 0.01)

    async def scenario() -> None:
        ended = asyncio.Event()

        async def never_read(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await ended.wait()
            writer.close()

        server = await asyncio.start_unix_server(never_read, tmp_path / "control")
        channel = await open_channel(f"unix:{tmp_path / 'control'}")
        channel.post("x" * MORE_THAN_IT_HOLDS)
        async with asyncio.timeout(DEADLINE_S):
            await channel.close()
        ended.set()
        server.close()
        await server.wait_closed()

    asyncio.run(scenario())
