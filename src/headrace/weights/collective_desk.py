"""Who asks for weights, and the broadcasts that answer them.

In: questions that receivers leave in the store (``ask/N``). Out: a plan for each (``plan/N``) and a broadcast to
all who wanted the same bundle. One thread takes in questions and gives each broadcast a thread of its own, which
it leaves behind when it takes too long.

Receivers of an update ask at about the same time, so whoever asks first waits ``settle_s`` at most for as many as
came the time before. A group is used again if exactly its members ask and all still have it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event

import torch
from torch.distributed import TCPStore

from headrace.errors import WeightSyncError
from headrace.weights.device import beside
from headrace.weights.process_group import Abandonable, Backend, Group, connect

_POLL_S = 0.005
_IDLE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where sender and receivers meet, and how long each waits there."""

    host: str
    port: int
    deadline_s: float

    def connect(self) -> TCPStore:
        return connect(self.host, self.port, self.deadline_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A receiver that waits for a bundle."""

    offer: int
    member: str
    group: str
    """Name of the group it still has; empty: none."""
    gpu: str
    """The one it computes on; empty: none."""
    buckets: list[int]
    """The lengths it has room for."""


class Desk:
    """Answers questions until ``closed``. ``find`` gives the bytes of an offer, or None once it is retired."""

    def __init__(
        self,
        meeting: Meeting,
        find: Callable[[int], Sequence[torch.Tensor] | None],
        *,
        num_expected: int,
        settle_s: float,
    ) -> None:
        self._meeting = meeting
        self._find = find
        self._num_expected = num_expected
        self._settle_s = settle_s
        self._num_read = 0
        self._unwritten: dict[int, float] = {}
        """Numbers that were given out, and when that was noticed."""
        self._waiting: dict[int, Ask] = {}
        """Questions by number."""
        self._num_groups = 0
        self._group: tuple[Group, tuple[str, ...]] | None = None
        """The last group that did its work, and who is in it."""
        self.busy = Event()
        """Set while bundles are on offer, and questions to be expected."""
        self.closed = Event()

    def run(self) -> None:
        store = self._meeting.connect()
        while not self.closed.is_set():
            self._read(store)
            if self._waiting:
                self._answer(self._gather(store))
            elif self.busy.is_set():
                time.sleep(_POLL_S)
            else:
                self.busy.wait(_IDLE_S)
        self._keep(None)

    def _gather(self, store: TCPStore) -> dict[int, Ask]:
        """Those who want what the first one wants, once all are there or it has waited long enough."""
        offer = next(iter(self._waiting.values())).offer
        deadline = time.monotonic() + self._settle_s
        while True:
            self._read(store)
            batch = {number: ask for number, ask in self._waiting.items() if ask.offer == offer}
            # Who asked again has given up its first question.
            newest = {ask.member: number for number, ask in batch.items()}
            if len(newest) >= self._num_expected or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        self._num_expected = len(newest)
        for number in batch:
            del self._waiting[number]
        return {number: batch[number] for number in newest.values()}

    def _answer(self, batch: dict[int, Ask]) -> None:
        at_work: list[Group] = []
        call = Abandonable(lambda: self._broadcast(batch, at_work), "weights broadcast")
        try:
            call.wait(self._meeting.deadline_s, "a broadcast of weights")
        except WeightSyncError:
            # The receivers have the same deadline, and tell their engines. The next group is a new one.
            for group in at_work:
                group.abandon()
            self._keep(None)
            return
        for group in at_work:
            self._keep((group, _members(batch)))

    def _keep(self, known: tuple[Group, tuple[str, ...]] | None) -> None:
        if self._group is not None and (known is None or known[0] is not self._group[0]):
            self._group[0].abandon()
        self._group = known

    def _broadcast(self, batch: dict[int, Ask], at_work: list[Group]) -> None:
        """``at_work`` receives the group before anything can hang in it."""
        store = self._meeting.connect()
        buckets = self._find(next(iter(batch.values())).offer)
        sizes = None if buckets is None else [len(bucket) for bucket in buckets]
        # Gloo ends the process of a member that has other room than is sent.
        for number in [number for number, ask in batch.items() if ask.buckets != sizes]:
            reason = "was retired" if sizes is None else "is on offer in other buckets"
            store.set(f"plan/{number}", json.dumps({"refused": reason}))
            del batch[number]
        if buckets is None or not batch:
            return
        asks = list(batch.values())
        backend, members = _backend(buckets, [ask.gpu for ask in asks]), _members(batch)
        group = self._usable(asks, members, backend)
        name = group.name if group is not None else self._new_name()
        size = 1 + len(members)
        for number, ask in batch.items():
            plan = {"group": name, "backend": backend, "rank": 1 + members.index(ask.member), "size": size}
            store.set(f"plan/{number}", json.dumps(plan))
        if group is None:
            group = Group(store, name, backend, rank=0, size=size, deadline_s=self._meeting.deadline_s)
        at_work.append(group)
        for bucket in buckets:
            group.broadcast([bucket if backend == "nccl" else _on_host(bucket)])

    def _usable(self, asks: Sequence[Ask], members: tuple[str, ...], backend: Backend) -> Group | None:
        if self._group is None:
            return None
        group, known = self._group
        same = known == members and group.backend == backend and all(a.group == group.name for a in asks)
        return group if same else None

    def _new_name(self) -> str:
        self._num_groups += 1
        return f"group/{self._num_groups}"

    def _read(self, store: TCPStore) -> None:
        """Take in the questions that are there. A number may stay without one: its receiver died before it
        had written down what it wants."""
        now, num_asked = time.monotonic(), store.add("asks", 0)
        for number in range(self._num_read + 1, num_asked + 1):
            self._unwritten[number] = now
        self._num_read = num_asked
        for number, since in list(self._unwritten.items()):
            key = f"ask/{number}"
            if store.check([key]):
                self._waiting[number] = Ask(**json.loads(store.get(key)))
                store.delete_key(key)
            elif now - since < self._meeting.deadline_s:
                continue
            del self._unwritten[number]


def _members(batch: dict[int, Ask]) -> tuple[str, ...]:
    return tuple(sorted(ask.member for ask in batch.values()))


def _backend(buckets: Sequence[torch.Tensor], gpus: Sequence[str]) -> Backend:
    """NCCL needs a GPU for each member, the sender included."""
    if not buckets or buckets[0].device.type != "cuda" or not torch.distributed.is_nccl_available():
        return "gloo"
    members = [gpu_name(buckets[0].device), *gpus]
    return "nccl" if "" not in members and len(set(members)) == len(members) else "gloo"


def gpu_name(device: torch.device) -> str:
    """The same for every process that uses this GPU; empty: it is none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _on_host(bucket: torch.Tensor) -> torch.Tensor:
    with beside(bucket, waits=False):
        return bucket.cpu()
