"""Whole messages over a stream: a unix-domain socket, or loopback TCP where there are none.

In and out: trees that ``wire`` can carry, each as one frame with its length in front. Both ends live on
this machine. Whoever connects must say the token first, because any local user can reach a TCP port;
a unix socket lies in a directory only its owner may enter.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace import wire
from headrace.errors import DeadlineError, RoleError

TOKEN_VARIABLE = "HEADRACE_TOKEN"
"""Where a role finds the token: an environment is its owner's alone, a command line is not."""

_LENGTH = struct.Struct("<Q")
_READ_AHEAD_BYTES = 4 << 20
_JOINED_BYTES = 1 << 16  # below this, copying a frame behind its header is cheaper than a second system call
_MOST_MESSAGES = 64  # in a frame: the other end begins with these while more are being written
_MAX_HELLO_BYTES = 4096
_MAX_UNIX_PATH_BYTES = 100
_HELLO_DEADLINE_S = 10.0


class ChannelClosed(Exception):
    """The other end is gone."""


class Channel:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._outbox = wire.FrameBuilder()
        self._inbox: deque[Any] = deque()

    async def receive(self, *, max_bytes: int | None = None) -> Any:
        while not self._inbox:
            self._inbox.extend(await self._receive_frame(max_bytes))
        return self._inbox.popleft()

    async def _receive_frame(self, max_bytes: int | None) -> list[Any]:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if max_bytes is not None and length > max_bytes:
                raise ChannelClosed
            frame = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ChannelClosed from None
        return wire.decode(frame)

    def post(self, message: Any) -> None:
        """Queue a message, from any thread; the order of one thread's messages is kept. What is posted
        after the other end went away is lost: the reading side learns of that, and says so."""
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self.post, message)
            return
        # What one turn of the event loop posts travels in few frames: an engine step may finish many requests.
        num_messages = self._outbox.add(message)
        if num_messages == 1:
            self._loop.call_soon(self._flush)
        if num_messages == _MOST_MESSAGES:
            self._flush()

    @property
    def backlog_bytes(self) -> int:
        """What was written and is not yet taken by the system."""
        return self._writer.transport.get_write_buffer_size()

    async def close(self) -> None:
        """Send what is queued, then hang up."""
        self._flush()
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return  # hung up by the other end first

    def abandon(self) -> None:
        """Hang up at once."""
        self._writer.transport.abort()

    def _flush(self) -> None:
        if len(self._outbox) == 0:
            return
        frame = self._outbox.take()
        if self._writer.is_closing():
            return
        header = _LENGTH.pack(len(frame))
        if len(frame) < _JOINED_BYTES:
            self._writer.write(header + frame)
        else:
            self._writer.write(header)
            self._writer.write(frame)


class Listener:
    """The controller's ear: each role connects once and is handed to whoever waits for its name."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.address = ""
        self._arrivals: dict[str, asyncio.Future[Channel]] = {}
        self._channels: set[Channel] = set()
        self._server: asyncio.Server | None = None

    async def open(self, directory: Path) -> None:
        """Listen at ``directory/control``; ``address`` then says where."""
        path = directory / "control"
        if sys.platform != "win32" and len(str(path).encode()) <= _MAX_UNIX_PATH_BYTES:
            self._server = await asyncio.start_unix_server(self._greet, path, limit=_READ_AHEAD_BYTES)
            self.address = f"unix:{path}"
        else:
            self._server = await asyncio.start_server(self._greet, "127.0.0.1", 0, limit=_READ_AHEAD_BYTES)
            self.address = f"tcp:{self._server.sockets[0].getsockname()[1]}"

    def expect(self, role: str) -> asyncio.Future[Channel]:
        """Resolves when ``role`` has connected."""
        self._arrivals[role] = asyncio.get_running_loop().create_future()
        return self._arrivals[role]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for arrival in self._arrivals.values():
            arrival.cancel()
        # Also those whose start was given up before anybody took them over.
        for channel in self._channels:
            channel.abandon()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        self._channels.add(channel)
        role = await self._hello(channel)
        arrival = self._arrivals.get(role) if role is not None else None
        if arrival is None or arrival.done():
            channel.abandon()
        else:
            arrival.set_result(channel)

    async def _hello(self, channel: Channel) -> str | None:
        """The role that says the token; None: a stranger."""
        try:
            async with asyncio.timeout(_HELLO_DEADLINE_S):
                hello = await channel.receive(max_bytes=_MAX_HELLO_BYTES)
        except (ChannelClosed, TimeoutError, ValueError):
            return None
        match hello:
            case ["hello", str(role), str(token)] if hmac.compare_digest(token, self.token):
                return role
        return None


async def connect(address: str, *, role: str, token: str, deadline_s: float = 30.0) -> Channel:
    """A role's way to its controller."""
    scheme, _, where = address.partition(":")
    openers: dict[str, Callable[[], Any]] = {
        "unix": lambda: asyncio.open_unix_connection(where, limit=_READ_AHEAD_BYTES),
        "tcp": lambda: asyncio.open_connection("127.0.0.1", int(where), limit=_READ_AHEAD_BYTES),
    }
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await openers[scheme]()
    except TimeoutError:
        raise DeadlineError(
            f"{role} could not reach its controller at {address} within {deadline_s:g} s"
        ) from None
    except OSError as error:
        raise RoleError(f"{role} found no controller at {address}: {error}") from error
    channel = Channel(reader, writer)
    channel.post(["hello", role, token])
    return channel
