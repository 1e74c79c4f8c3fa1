"""Weights by broadcast: one sender, all receivers that want a version at once, over a process group of their own.

In, at the trainer: named tensors, copied aside. Out, at each engine: the same bytes, verified whole. The manifest
travels by the ordinary control call and says where to meet; a receiver asks for its bundle there and is told
which group it belongs to (``collective_desk``).

Invariant: a receiver yields the bytes of the version it was promised, or raises and yields nothing. After a
failure both sides forget the group, and the next broadcast builds a new one from those who ask then: a member
that died, hangs or joins late costs the others a wait and nothing else. Whoever waits for a collective does so
beside it, on another thread, and leaves it behind at the deadline.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from threading import Lock, Thread
from typing import Any

import torch
from torch.distributed import TCPStore

from headrace.errors import WeightSyncError
from headrace.types import BundleKind, TensorBlob, TensorSlot, WeightManifest
from headrace.weights import device
from headrace.weights.bundle import (
    check_slots,
    chunk_sums,
    copy_and_digest,
    joined_digest,
    lay_out,
    on_host,
    unpack,
    views,
)
from headrace.weights.collective_desk import Ask, Desk, Meeting
from headrace.weights.process_group import Abandonable, Group, open_store

TRANSPORT = "collective"


class CollectiveSender:
    """The trainer's end."""

    def __init__(
        self, *, num_receivers: int, deadline_s: float, host: str = "127.0.0.1", settle_s: float = 2.0
    ) -> None:
        """``num_receivers`` are waited for at first, for ``settle_s`` at most. ``host`` is this machine's name
        for the receivers."""
        self._store = open_store(host, deadline_s)
        self._meeting = Meeting(host=host, port=self._store.port, deadline_s=deadline_s)
        self._lock = Lock()
        self._live: dict[tuple[int, str], tuple[int, torch.Tensor]] = {}
        """By version and kind: the number of the offer, and its bytes."""
        self._num_offers = 0
        self._desk = Desk(self._meeting, self._find, num_expected=num_receivers, settle_s=settle_s)
        Thread(target=self._desk.run, name="weights desk", daemon=True).start()

    def send(
        self,
        version: int,
        blobs: Iterable[TensorBlob],
        *,
        kind: BundleKind | None = None,
        base_version: int | None = None,
        result: str = "",
    ) -> WeightManifest:
        """Copy the tensors aside; they can be asked for until ``retire(version)``. Sending a version again
        replaces what was sent of the same kind."""
        kind = kind or "full"
        tensors = list(blobs)
        slots, num_bytes = lay_out(tensors)
        payload = torch.zeros(num_bytes, dtype=torch.uint8, device=_place_of(tensors))
        checksum = _copy_aside(version, slots, tensors, payload)
        with self._lock:
            self._num_offers += 1
            self._live[version, kind] = (self._num_offers, payload)
        self._desk.busy.set()
        return WeightManifest(
            version=version,
            base_version=base_version,
            kind=kind,
            transport=TRANSPORT,
            location=json.dumps({**asdict(self._meeting), "offer": self._num_offers}),
            num_bytes=num_bytes,
            digest=checksum,
            slots=slots,
            result=result,
        )

    def retire(self, version: int) -> None:
        """No longer answer who asks for this version; one that is not held is already retired."""
        with self._lock:
            self._live = {place: offer for place, offer in self._live.items() if place[0] != version}
            if not self._live:
                self._desk.busy.clear()

    def close(self) -> None:
        self._desk.closed.set()
        self._desk.busy.set()
        with self._lock:
            self._live.clear()

    def _find(self, offer: int) -> torch.Tensor | None:
        with self._lock:
            return next((payload for number, payload in self._live.values() if number == offer), None)


class CollectiveReceiver:
    """An engine's end."""

    def __init__(self) -> None:
        self._member = uuid.uuid4().hex
        self._group: Group | None = None
        self._store: tuple[Meeting, TCPStore] | None = None

    def receive(self, manifest: WeightManifest) -> Iterator[TensorBlob]:
        """Verifies a copy of the bundle now, then yields it tensor by tensor."""
        check_slots(manifest.slots, manifest.num_bytes)
        told = json.loads(manifest.location)
        offer, meeting = told.pop("offer"), Meeting(**told)
        what = f"version {manifest.version} by broadcast"
        arrived: list[tuple[torch.Tensor, Group]] = []
        call = Abandonable(lambda: arrived.append(self._join(meeting, offer, manifest)), "weights broadcast")
        try:
            call.wait(meeting.deadline_s, what)
        except WeightSyncError:
            # A thread that was left behind keeps what it holds; everything else is made anew.
            if self._group is not None:
                self._group.abort()
            self._group = self._store = None
            raise
        ((payload, self._group),) = arrived
        if _digest_of(manifest, payload) != manifest.digest:
            raise WeightSyncError(f"{what} does not match its digest; publish the weights again")
        whole: Any = payload.numpy() if payload.device.type == "cpu" else payload
        return unpack(manifest.slots, whole)

    def close(self) -> None:
        self._group = self._store = None

    def _join(self, meeting: Meeting, offer: int, manifest: WeightManifest) -> tuple[torch.Tensor, Group]:
        store, group = self._meet(meeting), self._group
        ask = Ask(offer=offer, member=self._member, group=group.name if group else "", gpu=_own_gpu())
        number = store.add("asks", 1)
        store.set(f"ask/{number}", json.dumps(asdict(ask)))
        plan = json.loads(store.get(f"plan/{number}"))
        store.delete_key(f"plan/{number}")
        if "gone" in plan:
            raise WeightSyncError(f"version {manifest.version} was retired; publish the weights again")
        if group is None or group.name != plan["group"]:
            group = Group(
                store,
                plan["group"],
                plan["backend"],
                rank=plan["rank"],
                size=plan["size"],
                deadline_s=meeting.deadline_s,
            )
        place = "cuda" if plan["backend"] == "nccl" else "cpu"
        payload = torch.empty(manifest.num_bytes, dtype=torch.uint8, device=place)
        group.broadcast(payload)
        return payload, group

    def _meet(self, meeting: Meeting) -> TCPStore:
        if self._store is None or self._store[0] != meeting:
            # Another sender numbers its groups anew.
            self._group = None
            self._store = (meeting, meeting.connect())
        return self._store[1]


def _place_of(tensors: Sequence[TensorBlob]) -> torch.device:
    """The GPU that all tensors are on, or the host."""
    places = {t.data.device if isinstance(t.data, torch.Tensor) else torch.device("cpu") for t in tensors}
    return places.pop() if len(places) == 1 else torch.device("cpu")


def _copy_aside(
    version: int, slots: Sequence[TensorSlot], tensors: Sequence[TensorBlob], payload: torch.Tensor
) -> str:
    """Copy the tensors into the payload; returns their digest."""
    if payload.device.type == "cpu":
        targets = views(slots, payload.numpy())
        return copy_and_digest(version, slots, on_host(tensors), targets, of="sources")
    parts = _shares(slots, payload)
    torch._foreach_copy_(parts, [tensor.data for tensor in tensors])
    return joined_digest(version, slots, [device.chunk_sums(part) for part in parts])


def _digest_of(manifest: WeightManifest, payload: torch.Tensor) -> str:
    if payload.device.type == "cpu":
        sums = chunk_sums(views(manifest.slots, payload.numpy()))
    else:
        sums = [device.chunk_sums(part) for part in _shares(manifest.slots, payload)]
    return joined_digest(manifest.version, manifest.slots, sums)


def _shares(slots: Sequence[TensorSlot], payload: torch.Tensor) -> list[torch.Tensor]:
    return [payload[slot.offset : slot.offset + slot.num_bytes] for slot in slots]


def _own_gpu() -> str:
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
