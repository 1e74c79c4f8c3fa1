"""Bytes into a socket, without waiting for a turn of the event loop.

In: pieces, in order, from one thread. Out: the same bytes at the other end, in the same order. What the socket takes at
once is written at once, the rest by a thread that lives until it is gone. An event loop would write the rest turn by
turn; an engine's turns are as long as its passes, and one pass may finish requests for many times what a socket holds.

Invariant: after ``end``, or once the other end is gone, nothing is written and nothing is kept.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque

_SYSTEM_BYTES = 4 << 20
"""Asked of the system for what is under way; it gives what it allows."""
_LOOK_S = 1.0
"""How often a thread that waits for a reader looks whether it was told to end."""


class SocketWriter:
    """Owns ``connection``, which must not block."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Condition()
        """Notified when nothing is left."""
        self._pieces: deque[memoryview] = deque()
        """What is not written yet; the first is being written."""
        self._backlog_bytes = 0
        self._ended = self._has_thread = False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SYSTEM_BYTES)

    @property
    def backlog_bytes(self) -> int:
        return self._backlog_bytes

    def write(self, piece: bytes | memoryview) -> None:
        rest = memoryview(piece)
        with self._lock:
            if self._ended:
                return
            if not self._pieces:
                rest = rest[self._send(rest) :]
            if not len(rest):
                return
            self._pieces.append(rest)
            self._backlog_bytes += len(rest)
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._work_off, name="socket writer", daemon=True).start()

    def wait_empty(self, deadline_s: float) -> bool:
        """Whether within so long nothing is left to write: all is taken by the system, or lost."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._pieces, deadline_s)

    def end(self) -> None:
        """Write no more, and let the socket go; a second call changes nothing."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            if self._has_thread:
                # Wakes it, wherever it waits; the socket is its to close.
                self._shut_down()
            else:
                self._socket.close()

    def _work_off(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_WRITE)
            while self._write_first():
                selector.select(_LOOK_S)

    def _write_first(self) -> bool:
        """Whether there is more to write."""
        with self._lock:
            if self._pieces and not self._ended:
                piece = self._pieces.popleft()
                num_sent = self._send(piece)
                self._backlog_bytes -= num_sent
                if num_sent < len(piece):
                    self._pieces.appendleft(piece[num_sent:])
                if self._pieces and not self._ended:
                    return True
            self._has_thread = False
            if self._ended:
                self._pieces.clear()
                self._backlog_bytes = 0
                self._socket.close()
            self._lock.notify_all()
            return False

    def _send(self, piece: memoryview) -> int:
        """Bytes the socket took, or that are lost because nobody is there any more: the reading side learns of that."""
        try:
            return self._socket.send(piece)
        except BlockingIOError:
            return 0
        except OSError:
            return len(piece)

    def _shut_down(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The other end was faster.
            return
