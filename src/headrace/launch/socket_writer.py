"""Bytes into a socket, without waiting for a turn of the event loop.

In: pieces, in order, from one thread. Out: the same bytes at the other end, in the same order. What the socket takes at
once is written at once, the rest by a thread that lives until it is gone. An event loop would write the rest turn by
turn; an engine's turns are as long as its passes, and one pass may finish requests for many times what a socket holds.

Invariant: after ``end``, or once the other end is gone, nothing is written and nothing is kept.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import deque

_SYSTEM_BYTES = 4 << 20
"""Asked of the system for what is under way."""
_MOST_BYTES = 1 << 20
"""Written at a time: whoever writes next waits as long."""
_LOOK_S = 1.0
"""How often a thread that waits for a reader looks whether it was told to end."""

# On Linux one that needs no descriptor of its own.
_Selector = getattr(selectors, "PollSelector", selectors.DefaultSelector)


class SocketWriter:
    """Owns ``connection``, which must not block."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._pieces: deque[memoryview] = deque()
        """What is not written yet."""
        self._backlog_bytes = 0
        self._ended = self._has_thread = False
        # Some systems give less, others refuse; both are well.
        with contextlib.suppress(OSError):
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
                threading.Thread(target=self._work_off, name="socket writer", daemon=True).start()
                self._has_thread = True

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
                self._rest()

    def _work_off(self) -> None:
        try:
            with _Selector() as selector:
                selector.register(self._socket, selectors.EVENT_WRITE)
                while self._write_more():
                    selector.select(_LOOK_S)
        except Exception:
            # What follows would be read as something else without what is missing.
            with self._lock:
                self._shut_down()
                self._rest()
            raise

    def _write_more(self) -> bool:
        """Write what fits of the first piece; whether there is more."""
        with self._lock:
            if self._pieces and not self._ended:
                piece = self._pieces.popleft()
                num_sent = self._send(piece)
                self._backlog_bytes -= num_sent
                if num_sent < len(piece):
                    self._pieces.appendleft(piece[num_sent:])
            if self._pieces and not self._ended:
                return True
            self._rest()
            return False

    def _rest(self) -> None:
        """The thread has nothing more to write."""
        self._has_thread = False
        self._pieces.clear()
        self._backlog_bytes = 0
        if self._ended:
            self._socket.close()

    def _send(self, piece: memoryview) -> int:
        try:
            return self._socket.send(piece[:_MOST_BYTES])
        except BlockingIOError:
            return 0
        except OSError:
            # Nobody is there any more, or this cannot be sent, and nothing after it may be. Both ends learn of that
            # where they read.
            self._shut_down()
            return len(piece)

    def _shut_down(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The other end was faster.
            return
