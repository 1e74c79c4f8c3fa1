"""Whole messages over a stream: a unix-domain socket, or loopback TCP where there are none.

In and out: trees that ``wire`` can carry, each as one frame with its length in front. Both ends live on
this machine. Whoever connects must say the token first, because any local user can reach a TCP port;
a unix socket lies in a directory only its owner may enter.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

from headrace import wire
from headrace.errors import DeadlineError, RoleError
from headrace.launch.frames import LENGTH, ChannelClosed, FrameProtocol

__all__ = ["TOKEN_VARIABLE", "Channel", "ChannelClosed", "Listener", "connect", "open_channel"]

TOKEN_VARIABLE = "HEADRACE_TOKEN"
"""Where a role finds the token: an environment is its owner's alone, a command line is not."""

_JOINED_BYTES = 1 << 16  # below this, copying a frame behind its header is cheaper than a second system call
_MOST_MESSAGES = 64  # in a frame: the other end begins with these while more are being written
_MAX_HELLO_BYTES = 4096
_MAX_UNIX_PATH_BYTES = 100
_HELLO_DEADLINE_S = 10.0
_CLOSE_DEADLINE_S = 10.0
_log = logging.getLogger(__name__)


class Channel:
    """One end of a connection."""

    def __init__(self, frames: FrameProtocol) -> None:
        self._frames = frames
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._outbox = wire.FrameBuilder()
        self._inbox: deque[Any] = deque()

    async def receive(self) -> Any:
        while not self._inbox:
            self._inbox.extend(wire.decode(await self._frames.receive()))
        return self._inbox.popleft()

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
        return self._frames.backlog_bytes

    async def close(self) -> None:
        """Send what is queued, then hang up; at once, if the other end does not read it in time."""
        self._flush()
        is_written = False
        try:
            is_written = await self._frames.written(_CLOSE_DEADLINE_S)
            if not is_written:
                _log.warning(
                    "the other end did not read the last %d bytes within %g s; it is hung up on",
                    self.backlog_bytes,
                    _CLOSE_DEADLINE_S,
                )
        finally:
            hang_up = self._frames.transport.close if is_written else self._frames.transport.abort
            hang_up()
        # Whoever hung up first, it ends here.
        await asyncio.shield(self._frames.closed)

    def abandon(self) -> None:
        """Hang up at once."""
        self._frames.transport.abort()

    def _flush(self) -> None:
        if len(self._outbox) == 0:
            return
        frame = self._outbox.take()
        header = LENGTH.pack(len(frame))
        self._frames.write((header + frame,) if len(frame) < _JOINED_BYTES else (header, frame))


class Listener:
    """The controller's ear: each role connects once and is handed to whoever waits for its name."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.address = ""
        self._arrivals: dict[str, asyncio.Future[Channel]] = {}
        self._channels: set[Channel] = set()
        self._greetings: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self, directory: Path) -> None:
        """Listen at ``directory/control``; ``address`` then says where."""
        path, loop = directory / "control", asyncio.get_running_loop()
        if sys.platform != "win32" and len(str(path).encode()) <= _MAX_UNIX_PATH_BYTES:
            self._server = await loop.create_unix_server(self._accept, path)
            self.address = f"unix:{path}"
        else:
            self._server = await loop.create_server(self._accept, "127.0.0.1", 0)
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

    def _accept(self) -> FrameProtocol:
        return FrameProtocol(self._connected, max_first_bytes=_MAX_HELLO_BYTES)

    def _connected(self, frames: FrameProtocol) -> None:
        task = asyncio.get_running_loop().create_task(self._greet(frames))
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    async def _greet(self, frames: FrameProtocol) -> None:
        channel = Channel(frames)
        self._channels.add(channel)
        role = await self._hello(channel)
        arrival = self._arrivals.get(role) if role is not None else None
        if arrival is None or arrival.done():
            channel.abandon()
            self._channels.discard(channel)
        else:
            frames.accept()
            arrival.set_result(channel)

    async def _hello(self, channel: Channel) -> str | None:
        """The role that says the token; None: a stranger."""
        try:
            async with asyncio.timeout(_HELLO_DEADLINE_S):
                hello = await channel.receive()
        except Exception:
            # Bytes that mean nothing can fail to be decoded in any way.
            return None
        match hello:
            case ["hello", str(role), str(token)] if token.isascii():
                return role if hmac.compare_digest(token, self.token) else None
        return None


async def open_channel(address: str) -> Channel:
    """Raises OSError where nobody listens."""
    scheme, _, where = address.partition(":")
    loop = asyncio.get_running_loop()
    if scheme == "unix":
        _, frames = await loop.create_unix_connection(FrameProtocol, where)
    else:
        _, frames = await loop.create_connection(FrameProtocol, "127.0.0.1", int(where))
    return Channel(frames)


async def connect(address: str, *, role: str, token: str, deadline_s: float = 30.0) -> Channel:
    """A role's way to its controller."""
    try:
        async with asyncio.timeout(deadline_s):
            channel = await open_channel(address)
    except TimeoutError:
        raise DeadlineError(
            f"{role} could not reach its controller at {address} within {deadline_s:g} s"
        ) from None
    except OSError as error:
        raise RoleError(f"{role} found no controller at {address}: {error}") from error
    channel.post(["hello", role, token])
    return channel
