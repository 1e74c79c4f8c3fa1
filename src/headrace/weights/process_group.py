"""A process group of weights' own, outside ``torch.distributed``'s default one, and its place to meet.

In: an address, a name for the group, a rank. Out: a group that broadcasts bytes from rank 0. Trainers may use
other groups at the same time; nothing here touches them, and none of them has more than the sender's device in
common with this one, so that neither can wait for the other. Gloo carries bytes in host memory, NCCL those on
GPUs. Whoever waits for a broadcast does so on another thread, and leaves it behind after ``deadline_s``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any, Literal

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from headrace.errors import WeightSyncError
from headrace.weights.device import beside

Backend = Literal["gloo", "nccl"]
_PIECE_BYTES = 64 << 20
_OUTLIVES_FAILURE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""By default torch ends the process when a collective of NCCL fails or takes too long. With these it ends the
collective, and an engine goes on serving."""

_environment_lock = Lock()


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
        self._is_sender = rank == 0
        self._is_abandoned = False
        meeting, timeout = PrefixStore(name, store), timedelta(seconds=deadline_s)
        if backend == "gloo":
            self._group: Any = ProcessGroupGloo(meeting, rank, size, timeout)
        else:
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            # Who waits gives up first, and aborts; this is for a process that forgot to.
            options._timeout = 2 * timeout
            with _environment(_OUTLIVES_FAILURE):
                self._group = ProcessGroupNCCL(meeting, rank, size, options)

    def broadcast(self, buckets: Sequence[torch.Tensor]) -> None:
        """uint8, all on one device, from rank 0 to the others, who have room in buckets of the same sizes; returns
        when all is there. On a GPU nothing else waits for it: an engine's passes go on beside a broadcast, and also
        beside one that hangs."""
        for bucket in buckets:
            # What is sent is complete. Room for it may be memory that an earlier computation still reads.
            with beside(bucket, waits=not self._is_sender):
                for piece in bucket.split(_PIECE_BYTES) if len(bucket) else ():
                    self._group.broadcast(piece, 0).wait()

    def abandon(self) -> None:
        """Give up what is under way, if anything is; the group cannot be used again. NCCL's kernels would otherwise
        wait on the GPU for ever. Nobody waits for the end of that either: it may hang as well."""
        if self.backend == "nccl" and not self._is_abandoned:
            self._is_abandoned = True
            Thread(target=self._group.abort, name="weights abort", daemon=True).start()


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """For what torch reads once, when a group is made. One thread at a time, or one would keep what another set."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value


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
