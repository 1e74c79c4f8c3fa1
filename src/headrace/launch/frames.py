"""Frames over a stream transport, each with its length in front.

In: what the transport reads. Out: whole frames, in order, through ``receive``. A frame that is larger than what is read
at a time is read straight into the memory it stays in: a batch of many megabytes is copied once on its way from the
socket. No more is read ahead than ``READ_AHEAD_BYTES`` and one frame; the writer on the other side then waits. Where
the first frame is limited, nothing behind it is looked at before ``accept``: a stranger has no memory but that. What is
written goes past the transport (``socket_writer``).
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence

from headrace.launch.socket_writer import SocketWriter

LENGTH = struct.Struct("<Q")
READ_AHEAD_BYTES = 4 << 20
_SCRATCH_BYTES = 1 << 16
_LOOK_S = 0.005


class ChannelClosed(Exception):
    """The other end is gone."""


class FrameProtocol(asyncio.BufferedProtocol):
    """One end of a connection; ``on_connect`` is called when there is one."""

    transport: asyncio.Transport

    def __init__(
        self, on_connect: Callable[[FrameProtocol], None] | None = None, *, max_first_bytes: int | None = None
    ) -> None:
        """A first frame of more than ``max_first_bytes`` ends the connection, and what follows it waits for ``accept``;
        None: whoever is there is accepted."""
        self._max_bytes = max_first_bytes
        self._waits_for_accept = False
        self._on_connect = on_connect
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._num_scratch = 0
        """Bytes at its beginning that belong to no frame yet."""
        self._frame: memoryview | None = None
        """The frame that is being read into its own memory; None: none is."""
        self._num_read = 0
        self._frames: deque[memoryview] = deque()
        self._num_waiting_bytes = 0
        self._writer: SocketWriter | None = None
        self._loop = asyncio.get_running_loop()
        self._arrival: asyncio.Future[None] | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()

    async def receive(self) -> memoryview:
        """The next frame; raises ChannelClosed when there is none left. One waits at a time."""
        while not self._frames:
            if self.closed.done():
                raise ChannelClosed
            self._arrival = self._loop.create_future()
            await self._arrival
        frame = self._frames.popleft()
        self._num_waiting_bytes -= len(frame)
        self._read_on()
        return frame

    def accept(self) -> None:
        """The first frame was judged: take what follows it, of any size."""
        self._max_bytes, self._waits_for_accept = None, False
        if self._frame is None:
            self._parse()
        self._read_on()

    def write(self, pieces: Sequence[bytes]) -> None:
        """What is written after the other end went away is lost."""
        if self.transport.is_closing():
            return
        if self._writer is None:
            self._writer = SocketWriter(self.transport.get_extra_info("socket").dup())
        for piece in pieces:
            self._writer.write(piece)

    @property
    def backlog_bytes(self) -> int:
        """What was written and is not yet taken by the system."""
        return 0 if self._writer is None else self._writer.backlog_bytes

    async def written(self, deadline_s: float) -> bool:
        """Whether within so long all is taken by the system, or lost."""
        due = self._loop.time() + deadline_s
        while self.backlog_bytes and self._loop.time() < due:
            await asyncio.sleep(_LOOK_S)
        return not self.backlog_bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._on_connect is not None:
            self._on_connect(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._writer is not None:
            self._writer.end()
        self.closed.set_result(None)
        self._wake()

    def get_buffer(self, size_hint: int) -> memoryview:
        if self._frame is not None:
            return self._frame[self._num_read :]
        return self._scratch[self._num_scratch :]

    def buffer_updated(self, num_bytes: int) -> None:
        if self._frame is None:
            self._num_scratch += num_bytes
            self._parse()
            return
        self._num_read += num_bytes
        if self._num_read == len(self._frame):
            self._add(self._frame)
            self._frame = None

    def _parse(self) -> None:
        """Take the frames out of what was read; of one that is not all there, the rest is read into its own memory."""
        at, end = 0, self._num_scratch
        while end - at >= LENGTH.size and not self._waits_for_accept:
            (length,) = LENGTH.unpack_from(self._scratch, at)
            if self._max_bytes is not None and length > self._max_bytes:
                self.transport.abort()
                return
            at += LENGTH.size
            frame, num_here = memoryview(bytearray(length)), min(length, end - at)
            frame[:num_here] = self._scratch[at : at + num_here]
            at += num_here
            if num_here < length:
                self._frame, self._num_read = frame, num_here
            else:
                self._add(frame)
        self._scratch[: end - at] = bytes(self._scratch[at:end])
        self._num_scratch = end - at

    def _add(self, frame: memoryview) -> None:
        self._frames.append(frame)
        self._num_waiting_bytes += len(frame)
        self._waits_for_accept = self._max_bytes is not None
        if self._waits_for_accept or self._num_waiting_bytes > READ_AHEAD_BYTES:
            self.transport.pause_reading()
        self._wake()

    def _read_on(self) -> None:
        waits = self._waits_for_accept or self._num_waiting_bytes > READ_AHEAD_BYTES
        if not waits and not self.closed.done():
            self.transport.resume_reading()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
