"""A process group of weights' own, outside ``torch.distributed``'s default one, and its place to meet.

In: an address, a name for the group, a rank. Out: a group that broadcasts bytes from rank 0. Trainers may use
other groups at the same time; nothing here touches them. Gloo carries bytes in host memory, NCCL those on
GPUs. Every wait ends after ``deadline_s``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread
from typing import Any, Literal

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from headrace.errors import WeightSyncError

Backend = Literal["gloo", "nccl"]
_BUCKET_BYTES = 64 << 20


def open_store(host: str, deadline_s: float) -> TCPStore:
    """Where members find each other; it lives as long as this process."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline_s))


def connect(host: str, port: int, deadline_s: float) -> TCPStore:
    """A connection for one thread: a store answers one question at a time."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=deadline_s))


class Group:
    def __init__(
        self, store: TCPStore, name: str, backend: Backend, *, rank: int, size: int, deadline_s: float
    ) -> None:
        """Waits for all members."""
        self.name = name
        self.backend = backend
        meeting, timeout = PrefixStore(name, store), timedelta(seconds=deadline_s)
        if backend == "gloo":
            self._group: Any = ProcessGroupGloo(meeting, rank, size, timeout)
        else:
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = ProcessGroupNCCL(meeting, rank, size, options)

    def broadcast(self, payload: torch.Tensor) -> None:
        """uint8, from rank 0 to all others; returns when it is there."""
        if payload.device.type == "cuda":
            torch.cuda.set_device(payload.device)
        for bucket in payload.split(_BUCKET_BYTES):
            self._group.broadcast(bucket, 0).wait()
        if payload.device.type == "cuda":
            torch.cuda.synchronize(payload.device)

    def abort(self) -> None:
        """Give up what is under way; the group cannot be used again."""
        if self.backend == "nccl":
            self._group.abort()


class Abandonable:
    """A call on a thread of its own that may be left behind: collectives can hang in ways nothing ends."""

    def __init__(self, call: Callable[[], None], name: str) -> None:
        self._call = call
        self._done = Event()
        self._error: Exception | None = None
        Thread(target=self._run, name=name, daemon=True).start()

    def wait(self, deadline_s: float, what: str) -> None:
        """Raises WeightSyncError if the call failed or takes longer."""
        if not self._done.wait(deadline_s):
            raise WeightSyncError(f"waited {deadline_s:g} s for {what}; publish the weights again")
        if isinstance(self._error, WeightSyncError):
            raise self._error
        if self._error is not None:
            reason = str(self._error).strip().partition("\n")[0]
            raise WeightSyncError(f"{what} failed ({reason}); publish the weights again") from self._error

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self._error = error
        self._done.set()
