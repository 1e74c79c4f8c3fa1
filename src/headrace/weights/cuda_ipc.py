"""Weights that never leave the GPU: the trainer's copy is opened by engines on the same device.

In, at the trainer: named tensors on the GPU. Out, at each engine: the same bytes, verified whole, still in the
trainer's memory; the engine copies them over its own between two passes. Other processes open the memory by
a CUDA IPC handle, which they keep; the trainer's own process uses it directly, since CUDA will not open a
handle where it was made.

Invariant: a receiver yields the bytes of the version it was promised, or raises and yields nothing. A sender
writes over a version's memory only after ``retire``, so a receiver must have copied before it acknowledges.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import WeightSyncError
from headrace.types import BundleKind, TensorBlob, TensorSlot, WeightManifest
from headrace.weights.bundle import ALIGNMENT_BYTES, check_slots, lay_out
from headrace.weights.gpu_segments import fixed_segments

if TYPE_CHECKING:
    from headrace.kernels.checksum import Chunks

TRANSPORT = "cuda_ipc"
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
    """The trainer's end. Retired buffers are used again."""

    def __init__(self, *, growing_segments: bool = False) -> None:
        """``growing_segments``: how this process takes its memory (``gpu_segments``)."""
        self._growing_segments = growing_segments
        self._live: dict[int, list[_Buffer]] = {}
        self._free: list[_Buffer] = []
        self._checksums = _Checksums()
        self._last_tensors: list[tuple[Any, ...]] = []
        self._last_layout: tuple[tuple[TensorSlot, ...], int] = ((), 0)

    def send(
        self, version: int, blobs: Iterable[TensorBlob], *, kind: BundleKind | None = None
    ) -> WeightManifest:
        """Copy the tensors aside; they stay valid until ``retire(version)``, also if the version is sent again: an
        engine may be reading them."""
        tensors = list(blobs)
        slots, num_bytes = self._layout_of(tensors)
        buffer = self._take(num_bytes, _device_of(tensors))
        sources: list[Any] = [tensor.data for tensor in tensors]
        checksum = self._checksums.of_copied(version, slots, sources, buffer.bytes)
        self._live.setdefault(version, []).append(buffer)
        return WeightManifest(
            version=version,
            base_version=None,
            kind=kind or "full",
            transport=TRANSPORT,
            location=buffer.location,
            num_bytes=num_bytes,
            digest=checksum,
            slots=slots,
        )

    def retire(self, version: int) -> None:
        """Free the version's memory for another; a version that is not held is already retired."""
        self._free += self._live.pop(version, [])

    def close(self) -> None:
        self._live.clear()
        self._free.clear()

    def _layout_of(self, tensors: Sequence[TensorBlob]) -> tuple[tuple[TensorSlot, ...], int]:
        """Bundles of one run are nearly all alike, and laying out hundreds of tensors takes a millisecond."""
        described = [(blob.name, blob.dtype, blob.shape, blob.data.nbytes, blob.form) for blob in tensors]
        if described != self._last_tensors:
            self._last_layout, self._last_tensors = lay_out(tensors), described
        return self._last_layout

    def _take(self, num_bytes: int, device: torch.device) -> _Buffer:
        room = -(-num_bytes // _ROOM_BYTES) * _ROOM_BYTES
        for buffer in self._free:
            if len(buffer.bytes) == room and buffer.bytes.device == device:
                self._free.remove(buffer)
                return buffer
        self._free.clear()
        return _Buffer(room, device, growing_segments=self._growing_segments)


class CudaIpcReceiver:
    """An engine's end. Verification runs beside the engine's own stream."""

    def __init__(self) -> None:
        self._opened: dict[str, torch.Tensor] = {}
        self._seen: dict[str, tuple[tuple[TensorSlot, ...], list[TensorBlob]]] = {}
        self._checksums = _Checksums()
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
        if self._stream is None:
            self._stream = torch.cuda.Stream(whole.device)
        with torch.cuda.stream(self._stream):
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
            if manifest.location in self._opened:
                self._seen[manifest.location] = slots, blobs
        return blobs

    def _open(self, manifest: WeightManifest) -> torch.Tensor:
        place, own = manifest.location, _own_buffers.get(manifest.location)
        if own is not None:
            return own.bytes
        if place not in self._opened:
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


class _Checksums:
    """Digests of bundles, whose slots are usually those of the last one: 32 hex digits from the sums of every tensor's
    words by chunk, hashed with the version and the slot table. They guard against accidents, as the digest of mapped
    memory does; the sums are taken where the bytes are."""

    def __init__(self) -> None:
        self._slots: tuple[TensorSlot, ...] = ()
        self._chunks: Chunks | None = None
        self._table = b""

    def of(self, version: int, slots: tuple[TensorSlot, ...], payload: torch.Tensor) -> str:
        return self._digest(version, self._of_slots(slots, payload.device).sums(payload))

    def of_copied(
        self,
        version: int,
        slots: tuple[TensorSlot, ...],
        sources: Sequence[torch.Tensor],
        payload: torch.Tensor,
    ) -> str:
        """Copies the sources to their slots."""
        from headrace.kernels.whole_copies import can_be_copied_wide

        if can_be_copied_wide(sources):
            sums = self._of_slots(slots, payload.device).copied_sums(sources, payload)
            return self._digest(version, sums)
        shares = [payload[slot.offset : slot.offset + slot.num_bytes] for slot in slots]
        torch._foreach_copy_(shares, list(sources))
        return self.of(version, slots, payload)

    def _of_slots(self, slots: tuple[TensorSlot, ...], device: torch.device) -> Chunks:
        if self._chunks is None or slots != self._slots:
            # Triton is needed on a GPU only.
            from headrace.kernels.checksum import Chunks

            self._slots = slots
            self._chunks = Chunks([(slot.offset, slot.num_bytes) for slot in slots], device)
            table = [[s.name, s.dtype, list(s.shape), s.offset, s.num_bytes] for s in slots]
            self._table = json.dumps(table).encode()
        return self._chunks

    def _digest(self, version: int, sums: torch.Tensor) -> str:
        whole = hashlib.blake2b(f"{version} ".encode() + self._table, digest_size=16)
        whole.update(sums.cpu().numpy().tobytes())
        return whole.hexdigest()


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
