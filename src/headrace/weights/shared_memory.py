"""Weights through shared memory: a mapped file per published version, in ``/dev/shm`` where there is one.

In, at the trainer: named tensors. Out, at each engine: the same tensors, verified whole. Plain files are
used, so the bytes live until the sender (or whoever sweeps after it) removes them; a reader may come
and go.

    segment = header page (state, version, length, digest) + payload

Invariant: a receiver yields the bytes of the version it was promised, or raises and yields nothing.
A sender overwrites a segment only after ``retire``, and marks the header before the first byte changes.
A reader that was given up on may still be at work then, so a receiver never trusts shared bytes: it copies
them into memory of its own and verifies that copy, and only the copy is handed out. It reads
the file instead of mapping it, because a mapped file that shrinks kills its reader with SIGBUS.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import sys
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from headrace.errors import WeightSyncError
from headrace.types import TensorBlob, WeightManifest
from headrace.weights.bundle import ALIGNMENT_BYTES, check_slots, digest, lay_out, unpack
from headrace.weights.segment_directory import create_segment_directory, segment_root, sweep

__all__ = ["SharedMemoryReceiver", "SharedMemorySender", "create_segment_directory", "segment_root", "sweep"]

TRANSPORT = "shared_memory"
HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sqqQ16s")
_MAGIC = b"HEADRACE"
_FREE, _WRITING, _WHOLE = 0, 1, 2


class SharedMemorySender:
    """The trainer's end. Retired segments are used again: touching fresh pages costs more than copying."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._live: dict[int, _Segment] = {}
        self._free: list[_Segment] = []
        self._num_created = 0

    def send(self, version: int, blobs: Iterable[TensorBlob]) -> WeightManifest:
        """Copy the tensors out; they stay valid until ``retire(version)``. Sending a version again
        replaces what was sent."""
        tensors = list(blobs)
        slots, num_bytes = lay_out(tensors)
        segment = self._take(num_bytes)
        segment.mark(_WRITING, version, num_bytes, bytes(16))
        for slot, tensor in zip(slots, tensors, strict=True):
            start = HEADER_BYTES + slot.offset
            end = start + slot.num_bytes
            gap_bytes = -slot.num_bytes % ALIGNMENT_BYTES
            on_host = tensor.data if isinstance(tensor.data, np.ndarray) else tensor.data.cpu().numpy()
            segment.map[start:end] = on_host.data
            segment.map[end : end + gap_bytes] = bytes(gap_bytes)
        with memoryview(segment.map) as whole, whole[HEADER_BYTES : HEADER_BYTES + num_bytes] as payload:
            checksum = digest(version, slots, payload)
        segment.mark(_WHOLE, version, num_bytes, bytes.fromhex(checksum))
        self.retire(version)
        self._live[version] = segment
        return WeightManifest(
            version=version,
            base_version=None,
            kind="full",
            transport=TRANSPORT,
            location=str(segment.path),
            num_bytes=num_bytes,
            digest=checksum,
            slots=slots,
        )

    def retire(self, version: int) -> None:
        """Free the version's segment for another; a version that is not held is already retired."""
        segment = self._live.pop(version, None)
        if segment is not None:
            segment.mark(_FREE, version, 0, bytes(16))
            self._free.append(segment)

    def close(self) -> None:
        """Remove every segment. The directory belongs to whoever made it."""
        for segment in [*self._live.values(), *self._free]:
            segment.remove()
        self._live.clear()
        self._free.clear()

    def _take(self, num_bytes: int) -> _Segment:
        fitting = [s for s in self._free if s.capacity_bytes >= num_bytes]
        if fitting:
            segment = min(fitting, key=lambda s: s.capacity_bytes)
            self._free.remove(segment)
            return segment
        while self._free:
            self._free.pop().remove()
        self._num_created += 1
        return _Segment(self._directory / f"segment-{os.getpid()}-{self._num_created}", num_bytes)


class _Segment:
    """One mapped file that the sender writes."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        size = HEADER_BYTES + capacity_bytes
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # Reserving the pages turns a full disk into an error here; a hole in the mapping would
                # turn it into SIGBUS at the first write.
                if sys.platform == "linux":
                    os.posix_fallocate(descriptor, 0, size)
                else:
                    os.ftruncate(descriptor, size)
                self.map = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise WeightSyncError(
                f"cannot map {size} bytes at {path} ({error.strerror}; {_free_bytes(path.parent)} bytes are "
                "free): make room there or raise the size of /dev/shm"
            ) from error

    def mark(self, state: int, version: int, num_bytes: int, checksum: bytes) -> None:
        _HEADER.pack_into(self.map, 0, _MAGIC, state, version, num_bytes, checksum)

    def remove(self) -> None:
        self.map.close()
        self.path.unlink(missing_ok=True)


class SharedMemoryReceiver:
    """An engine's end."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._lent: weakref.ref[np.ndarray] | None = None

    def receive(self, manifest: WeightManifest) -> Iterator[TensorBlob]:
        """Verifies a private copy of the bundle now, then yields it tensor by tensor.

        The tensors are views of that copy; its memory is used again once none of them is alive.
        """
        check_slots(manifest.slots, manifest.num_bytes)
        private = self._private_memory(manifest.num_bytes)
        try:
            with open(manifest.location, "rb", buffering=0) as file:
                _check_header(file.fileno(), manifest)
                num_read = _read_into(file.fileno(), private.data)
                _check_payload(file.fileno(), manifest, private.data, num_read)
        except FileNotFoundError:
            raise WeightSyncError(
                f"version {manifest.version} is not at {manifest.location}: its segment was removed; "
                "publish the weights again"
            ) from None
        return unpack(manifest.slots, private)

    def close(self) -> None:
        self._memory = self._lent = None

    def _private_memory(self, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes]. Every tensor handed out keeps this array alive as its base, so once it is gone,
        none is left and its memory can be filled again."""
        lent = self._lent() if self._lent is not None else None
        if self._memory is None or len(self._memory) < num_bytes or lent is not None:
            self._memory = mmap.mmap(-1, max(num_bytes, 1))
        private = np.frombuffer(self._memory, dtype=np.uint8, count=num_bytes)
        self._lent = weakref.ref(private)
        return private


def _check_header(descriptor: int, manifest: WeightManifest) -> None:
    what = f"the segment of version {manifest.version} at {manifest.location}"
    size, needed = os.fstat(descriptor).st_size, HEADER_BYTES + manifest.num_bytes
    if size < needed:
        raise WeightSyncError(f"{what} is truncated to {size} of {needed} bytes; publish the weights again")
    magic, state, version, num_bytes, checksum = _HEADER.unpack(os.pread(descriptor, _HEADER.size, 0))
    if magic != _MAGIC:
        raise WeightSyncError(f"{what} is not a Headrace segment; publish the weights again")
    if version != manifest.version:
        raise WeightSyncError(f"{what} holds version {version}: it was retired and used again")
    if state != _WHOLE:
        raise WeightSyncError(f"{what} was {'retired' if state == _FREE else 'never finished'}")
    if num_bytes != manifest.num_bytes or checksum.hex() != manifest.digest:
        raise WeightSyncError(f"{what} holds another bundle than the one announced: it was sent again")


def _read_into(descriptor: int, payload: memoryview) -> int:
    num_read = 0
    while num_read < len(payload):
        with payload[num_read:] as rest:
            num_new = os.preadv(descriptor, [rest], HEADER_BYTES + num_read)
        if num_new == 0:
            break
        num_read += num_new
    return num_read


def _check_payload(descriptor: int, manifest: WeightManifest, payload: memoryview, num_read: int) -> None:
    if (
        num_read == manifest.num_bytes
        and digest(manifest.version, manifest.slots, payload) == manifest.digest
    ):
        return
    _check_header(descriptor, manifest)  # names the cause where the header can tell
    raise WeightSyncError(
        f"version {manifest.version} at {manifest.location} does not match its digest: the bytes are torn or "
        "overwritten; publish the weights again"
    )


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free
