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

import numpy as np
import torch
from torch.distributed import TCPStore

from headrace.errors import WeightSyncError
from headrace.types import BundleKind, TensorBlob, TensorSlot, WeightManifest
from headrace.weights import device
from headrace.weights.bundle import (
    Layout,
    blob_bytes,
    check_slots,
    chunk_sums,
    in_buckets,
    joined_digest,
    on_host,
    unpack,
)
from headrace.weights.collective_desk import Ask, Desk, Meeting, gpu_name
from headrace.weights.process_group import Abandonable, Group, open_store

TRANSPORT = "collective"
_BUCKET_BYTES = 256 << 20


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
        self._live: dict[int, tuple[int, list[torch.Tensor]]] = {}
        """By the number of the offer: its version, and its bytes in buckets."""
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
        """Copy the tensors aside; they can be asked for until ``retire(version)``, also where the version is sent
        again: somebody may still be about to ask for what was sent first."""
        kind = kind or "full"
        layout, sums, buckets = Layout(), [], []
        for tensors in in_buckets(blobs, blob_bytes, _BUCKET_BYTES):
            start = layout.num_bytes
            slots = layout.add(tensors)
            room = torch.zeros(
                layout.num_bytes - start, dtype=torch.uint8, device=_place_of(tensors[0], kind)
            )
            sums += _copy_aside(slots, tensors, room, start)
            buckets.append(room)
            del tensors
        with self._lock:
            self._num_offers += 1
            self._live[self._num_offers] = (version, buckets)
        self._desk.busy.set()
        told = {"offer": self._num_offers, "buckets": [len(bucket) for bucket in buckets]}
        return WeightManifest(
            version=version,
            base_version=base_version,
            kind=kind,
            transport=TRANSPORT,
            location=json.dumps({**asdict(self._meeting), **told}),
            num_bytes=layout.num_bytes,
            digest=joined_digest(version, layout.slots, sums),
            slots=layout.slots,
            result=result,
        )

    def retire(self, version: int) -> None:
        """No longer answer who asks for this version; one that is not held is already retired."""
        with self._lock:
            self._live = {number: offer for number, offer in self._live.items() if offer[0] != version}
            if not self._live:
                self._desk.busy.clear()

    def close(self) -> None:
        self._desk.closed.set()
        self._desk.busy.set()
        with self._lock:
            self._live.clear()

    def _find(self, offer: int) -> list[torch.Tensor] | None:
        with self._lock:
            found = self._live.get(offer)
            return None if found is None else found[1]


class CollectiveReceiver:
    """An engine's end."""

    def __init__(self, place: torch.device | None = None) -> None:
        """``place``: where the engine computes; None: on the host."""
        self._place = place or torch.device("cpu")
        self._member = uuid.uuid4().hex
        self._group: Group | None = None
        self._store: tuple[Meeting, TCPStore] | None = None

    def receive(self, manifest: WeightManifest) -> Iterator[TensorBlob]:
        """Verifies a copy of the bundle now, then yields it tensor by tensor."""
        check_slots(manifest.slots, manifest.num_bytes)
        told = json.loads(manifest.location)
        offer, sizes, meeting = told.pop("offer"), told.pop("buckets"), Meeting(**told)
        if sum(sizes) != manifest.num_bytes:
            raise WeightSyncError(
                f"the buckets of version {manifest.version} are not its bytes; publish again"
            )
        what = f"version {manifest.version} by broadcast"
        at_work: list[Group] = []
        arrived: list[torch.Tensor] = []
        call = Abandonable(
            lambda: arrived.append(self._join(meeting, offer, sizes, manifest.version, at_work)),
            "weights broadcast",
        )
        try:
            call.wait(meeting.deadline_s, what)
        except WeightSyncError:
            # A thread that was left behind keeps what it holds; everything else is made anew.
            for group in at_work:
                group.abandon()
            self._keep(None)
            self._store = None
            raise
        self._keep(at_work[0])
        (payload,) = arrived
        if _digest_of(manifest, payload) != manifest.digest:
            raise WeightSyncError(f"{what} does not match its digest; publish the weights again")
        whole: Any = payload.numpy() if payload.device.type == "cpu" else payload
        return unpack(manifest.slots, whole)

    def close(self) -> None:
        self._keep(None)
        self._store = None

    def _keep(self, group: Group | None) -> None:
        if self._group is not None and self._group is not group:
            self._group.abandon()
        self._group = group

    def _join(
        self, meeting: Meeting, offer: int, sizes: Sequence[int], version: int, at_work: list[Group]
    ) -> torch.Tensor:
        """The bytes of an offer. ``at_work`` receives the group before anything can hang in it."""
        store, group = self._meet(meeting), self._group
        gpu = gpu_name(self._place)
        ask = Ask(
            offer=offer,
            member=self._member,
            group=group.name if group else "",
            gpu=gpu,
            buckets=list(sizes),
        )
        number = store.add("asks", 1)
        store.set(f"ask/{number}", json.dumps(asdict(ask)))
        plan = json.loads(store.get(f"plan/{number}"))
        store.delete_key(f"plan/{number}")
        if "refused" in plan:
            raise WeightSyncError(f"version {version} {plan['refused']}; publish the weights again")
        if group is None or group.name != plan["group"]:
            group = Group(
                store,
                plan["group"],
                plan["backend"],
                rank=plan["rank"],
                size=plan["size"],
                deadline_s=meeting.deadline_s,
            )
        at_work.append(group)
        place = self._place if plan["backend"] == "nccl" else torch.device("cpu")
        payload = torch.empty(sum(sizes), dtype=torch.uint8, device=place)
        group.broadcast(payload.split(list(sizes)))
        return payload

    def _meet(self, meeting: Meeting) -> TCPStore:
        if self._store is None or self._store[0] != meeting:
            # Another sender numbers its groups anew.
            self._keep(None)
            self._store = (meeting, meeting.connect())
        return self._store[1]


def _place_of(tensor: TensorBlob, kind: BundleKind) -> torch.device:
    """Where a bundle is offered: where its tensors are, save that differences are written on the host."""
    on_device = isinstance(tensor.data, torch.Tensor) and kind != "delta"
    return tensor.data.device if on_device else torch.device("cpu")


def _copy_aside(
    slots: Sequence[TensorSlot], tensors: Sequence[TensorBlob], room: torch.Tensor, start: int
) -> list[np.ndarray]:
    """Copy the tensors of a bucket, which begins at ``start``; returns their chunk sums. On a GPU these are waited
    for, so the bytes are complete."""
    parts = [room[slot.offset - start : slot.offset - start + slot.num_bytes] for slot in slots]
    if room.device.type == "cpu":
        return chunk_sums(on_host(tensors), [part.numpy() for part in parts])
    torch._foreach_copy_(parts, [torch.as_tensor(tensor.data) for tensor in tensors])
    return [device.chunk_sums(part) for part in parts]


def _digest_of(manifest: WeightManifest, payload: torch.Tensor) -> str:
    shares = [payload[slot.offset : slot.offset + slot.num_bytes] for slot in manifest.slots]
    if payload.device.type == "cpu":
        sums = chunk_sums([share.numpy() for share in shares])
    else:
        with device.beside(payload, waits=False):
            sums = [device.chunk_sums(share) for share in shares]
    return joined_digest(manifest.version, manifest.slots, sums)
