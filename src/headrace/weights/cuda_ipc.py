"""Weights that never leave the GPU: the trainer's copy is opened by engines on the same device.

In, at the trainer: named tensors on the GPU. Out, at each engine: the same bytes, verified whole, still in the
trainer's memory; the engine copies them over its own between two passes. Other processes open the memory by
a CUDA IPC handle, which they keep; the trainer's own process uses it directly, since CUDA will not open a
handle where it was made.

Invariant: a receiver yields the bytes of the version it was promised, or raises and yields nothing. A sender
writes over a version's memory only after ``retire``, so a receiver must have copied before it acknowledges.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from headrace.errors import WeightSyncError
from headrace.types import BundleKind, TensorBlob, TensorSlot, WeightManifest
from headrace.weights.bundle import ALIGNMENT_BYTES, blob_bytes, check_slots, in_buckets
from headrace.weights.gpu_bundle import Checksums, Part, digest, joined_slots, slot_table
from headrace.weights.gpu_segments import fixed_segments
from headrace.weights.segment_directory import process_start

TRANSPORT = "cuda_ipc"
_BUCKET_BYTES = 1 << 30
_ROOM_BYTES = 1 << 20
"""Buffers are multiples of it, so that bundles of nearly one size can use the same."""

_own_buffers: weakref.WeakValueDictionary[str, _Buffer] = weakref.WeakValueDictionary()


class _Buffer:
    """One piece of GPU memory for a whole bundle."""

    def __init__(self, num_bytes: int, device: torch.device, *, growing_segments: bool) -> None:
        with fixed_segments() if growing_segments else nullcontext():
            self.bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.location = json.dumps({"pid": os.getpid(), "storage": _handle(self.bytes.untyped_storage())})
        _own_buffers[self.location] = self


class CudaIpcSender:
    """The trainer's end. Retired buffers are used again. Tensors are taken a bucket at a time, so that those which are
    made for it (gathered from other ranks, brought from the host) never exist all at once."""

    def __init__(self, *, growing_segments: bool = False, room_bytes: int = 0) -> None:
        """``growing_segments``: how this process takes its memory (``gpu_segments``). ``room_bytes``: the length of
        a complete bundle, as far as it is known; while it is not, tensors are held until all are there."""
        self._growing_segments = growing_segments
        self._live: dict[int, list[_Buffer]] = {}
        self._free: list[_Buffer] = []
        self._last_bytes: dict[str, int] = {"full": room_bytes}
        """Of the bundle of each kind sent last: the next will be about as long."""
        # Of the last bundle: those of one run are nearly all alike, and laying out hundreds of tensors takes a
        # millisecond.
        self._parts: list[Part] = []
        self._slots: tuple[TensorSlot, ...] = ()
        self._table = b""

    def send(
        self, version: int, blobs: Iterable[TensorBlob], *, kind: BundleKind | None = None
    ) -> WeightManifest:
        """Copy the tensors aside; they stay valid until ``retire(version)``, also if the version is sent again: an
        engine may be reading them."""
        kind = kind or "full"
        buffer: _Buffer | None = None
        parts: list[Part] = []
        sums: list[torch.Tensor] = []
        limit = _BUCKET_BYTES if self._last_bytes.get(kind) else sys.maxsize
        for bucket in in_buckets(blobs, blob_bytes, limit):
            part = self._part(len(parts), parts[-1].end if parts else 0, bucket)
            buffer = self._with_room(buffer, part, kind)
            sums.append(part.copied_sums(bucket, buffer.bytes))
            parts.append(part)
            del bucket
        if buffer is None:
            raise WeightSyncError("there is nothing to send: the bundle has no tensors")
        if parts != self._parts:
            self._parts, self._slots = parts, joined_slots(parts)
            self._table = slot_table(self._slots)
        self._last_bytes[kind] = parts[-1].end
        self._live.setdefault(version, []).append(buffer)
        return WeightManifest(
            version=version,
            base_version=None,
            kind=kind,
            transport=TRANSPORT,
            location=buffer.location,
            num_bytes=parts[-1].end,
            digest=digest(version, self._table, torch.cat(sums)),
            slots=self._slots,
        )

    def retire(self, version: int) -> None:
        """Free the version's memory for another; a version that is not held is already retired."""
        self._free += self._live.pop(version, [])

    def close(self) -> None:
        self._live.clear()
        self._free.clear()

    def _part(self, number: int, start: int, bucket: Sequence[TensorBlob]) -> Part:
        described = [(blob.name, blob.dtype, blob.shape, blob.data.nbytes, blob.form) for blob in bucket]
        place = (start, _device_of(bucket), described)
        known = self._parts[number] if number < len(self._parts) else None
        return known if known is not None and known.place == place else Part(place, bucket)

    def _with_room(self, buffer: _Buffer | None, part: Part, kind: str) -> _Buffer:
        """The buffer that is being written, or a first one, with room for another part."""
        if buffer is None:
            return self._take(max(part.end, self._last_bytes.get(kind, 0)), part.device)
        if len(buffer.bytes) >= part.end:
            return buffer
        longer = self._take(max(part.end, 2 * part.start), part.device)
        longer.bytes[: part.start].copy_(buffer.bytes[: part.start])
        return longer

    def _take(self, num_bytes: int, device: torch.device) -> _Buffer:
        room = -(-num_bytes // _ROOM_BYTES) * _ROOM_BYTES
        for buffer in self._free:
            if len(buffer.bytes) == room and buffer.bytes.device == device:
                self._free.remove(buffer)
                return buffer
        self._free.clear()
        return _Buffer(room, device, growing_segments=self._growing_segments)


class CudaIpcReceiver:
    """An engine's end. Verification runs beside the engine's own stream. An engine on another GPU of the machine
    verifies, and is given, a copy on its own: kernels that copy weights read one GPU's memory."""

    def __init__(self, place: torch.device | None = None) -> None:
        """``place``: where the engine computes; None: where the trainer does."""
        self._place = place
        self._opened: dict[str, torch.Tensor] = {}
        self._seen: dict[str, tuple[tuple[TensorSlot, ...], list[TensorBlob]]] = {}
        self._checksums = Checksums()
        self._stream: torch.cuda.Stream | None = None

    def receive(self, manifest: WeightManifest) -> Iterator[TensorBlob]:
        """Verifies the bundle now, then yields views of the sender's memory."""
        check_slots(manifest.slots, manifest.num_bytes)
        if any(slot.offset % ALIGNMENT_BYTES for slot in manifest.slots):
            raise WeightSyncError(f"the slots of version {manifest.version} are not aligned; publish again")
        whole = self._open(manifest)
        if manifest.num_bytes > len(whole):
            # The sums would be read past its end, which a GPU does not survive.
            raise WeightSyncError(
                f"version {manifest.version} is said to have {manifest.num_bytes} bytes, but the trainer's GPU memory "
                f"there has {len(whole)}; publish again"
            )
        place = whole.device if self._place is None or self._place.type != "cuda" else self._place
        if self._stream is None:
            self._stream = torch.cuda.Stream(place)
        with torch.cuda.stream(self._stream):
            whole = whole if whole.device == place else whole[: manifest.num_bytes].to(place)
            found = self._checksums.of(manifest.version, manifest.slots, whole)
        if found != manifest.digest:
            raise WeightSyncError(
                f"version {manifest.version} in the trainer's GPU memory does not match its digest: it was retired "
                "or written over; publish the weights again"
            )
        return iter(self._views(manifest, whole))

    def close(self) -> None:
        self._opened.clear()
        self._seen.clear()

    def _views(self, manifest: WeightManifest, whole: torch.Tensor) -> list[TensorBlob]:
        """A sender uses a few buffers in turn, so those of a place are usually the last ones there."""
        slots, blobs = self._seen.get(manifest.location, ((), []))
        if slots != manifest.slots:
            slots = manifest.slots
            blobs = [
                TensorBlob(
                    name=slot.name,
                    dtype=slot.dtype,
                    shape=slot.shape,
                    data=whole[slot.offset : slot.offset + slot.num_bytes],
                )
                for slot in slots
            ]
            if whole is self._opened.get(manifest.location):
                self._seen[manifest.location] = slots, blobs
        return blobs

    def _open(self, manifest: WeightManifest) -> torch.Tensor:
        place, own = manifest.location, _own_buffers.get(manifest.location)
        if own is not None:
            return own.bytes
        if place not in self._opened:
            self._let_go_of_the_dead()
            try:
                storage = _open_handle(json.loads(place)["storage"])
            except (ValueError, KeyError, RuntimeError) as error:
                reason = str(error).strip().splitlines()[0]
                raise WeightSyncError(
                    f"the trainer's GPU memory of version {manifest.version} cannot be opened ({reason}); both "
                    "must use the same GPU and live at the same time"
                ) from error
            self._opened[place] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return self._opened[place]

    def _let_go_of_the_dead(self) -> None:
        """Memory stays on the GPU while anybody has it open, also when the process that took it has died."""
        for place in [place for place in self._opened if process_start(json.loads(place)["pid"]) is None]:
            del self._opened[place]
            self._seen.pop(place, None)


def _device_of(tensors: Sequence[TensorBlob]) -> torch.device:
    """The one GPU that all are on: they are read by address."""
    places = {blob.data.device if isinstance(blob.data, torch.Tensor) else "the host" for blob in tensors}
    device = places.pop() if len(places) == 1 else None
    if not isinstance(device, torch.device) or device.type != "cuda":
        raise WeightSyncError(
            "the weights are not on one GPU, all of them; set weights.transport to shared_memory"
        )
    return device


def _handle(storage: torch.UntypedStorage) -> list[Any]:
    """What another process needs to open the storage, as plain JSON values."""
    return [{"hex": part.hex()} if isinstance(part, bytes) else part for part in storage._share_cuda_()]


def _open_handle(handle: Sequence[Any]) -> torch.UntypedStorage:
    torch.cuda._lazy_init()
    parts = [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in handle]
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(*parts)
    return storage
