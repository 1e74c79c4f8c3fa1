"""Weights through shared memory: a mapped file per published version, in ``/dev/shm`` where there is one.

In, at the trainer: named tensors. Out, at each engine: the same tensors, verified whole. Plain files are
used, so the bytes live until the sender (or whoever sweeps after it) removes them; a reader may come
and go.

    segment = header page (state, version, length, digest) + payload

Invariant: a receiver yields the bytes of the version it was promised, or raises and yields nothing.
A sender overwrites a segment only after ``retire``, and marks the header before the first byte changes. It takes
tensors a bucket at a time, so that those which are made for it (gathered, brought from a GPU) never exist all at once.
A reader that was given up on may still be at work then, so a receiver never trusts shared bytes: it copies
them into memory of its own and verifies that copy, and only the copy is handed out. It maps the file (reading
it is three times as slow) after a look at its length: a mapped file that shrinks kills its reader with
SIGBUS, and no sender shortens one.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import sys
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from headrace.errors import WeightSyncError
from headrace.types import BundleKind, TensorBlob, WeightManifest
from headrace.weights.bundle import (
    Layout,
    blob_bytes,
    check_slots,
    chunk_sums,
    copy_and_digest,
    in_buckets,
    joined_digest,
    on_host,
    unpack,
    views,
)
from headrace.weights.segment_directory import create_segment_directory, segment_root, sweep

__all__ = ["SharedMemoryReceiver", "SharedMemorySender", "create_segment_directory", "segment_root", "sweep"]

TRANSPORT = "shared_memory"
HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sqqQ16s")
_MAGIC = b"HEADRACE"
_FREE, _WRITING, _WHOLE = 0, 1, 2
_NOTHING = np.zeros(0, np.uint8)
_BUCKET_BYTES = 256 << 20
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
"""Where the system can, pages are mapped all at once, not one by one as they are first written."""


class SharedMemorySender:
    """The trainer's end. Retired segments are used again: touching fresh pages costs more than copying."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._live: dict[int, list[_Segment]] = {}
        """By version."""
        self._free: list[_Segment] = []
        self._num_created = 0
        self._last_bytes: dict[str, int] = {}
        """Of the bundle of each kind sent last: the next will be about as long."""

    def send(
        self,
        version: int,
        blobs: Iterable[TensorBlob],
        *,
        kind: BundleKind | None = None,
        base_version: int | None = None,
        result: str = "",
    ) -> WeightManifest:
        """Copy the tensors out; they stay valid until ``retire(version)``, also where the version is sent again:
        somebody may still be reading what was sent first."""
        kind = kind or "full"
        layout = Layout()
        sums: list[np.ndarray] = []
        segment: _Segment | None = None
        try:
            for bucket in in_buckets(blobs, blob_bytes, _BUCKET_BYTES):
                slots = layout.add(bucket)
                segment = self._with_room(segment, layout.num_bytes, version, kind)
                sums += chunk_sums(on_host(bucket), views(slots, segment.payload))
                del bucket
            segment = self._with_room(segment, layout.num_bytes, version, kind)
        except BaseException:
            if segment is not None:
                segment.remove()
            raise
        checksum = joined_digest(version, layout.slots, sums)
        segment.mark(_WHOLE, version, layout.num_bytes, bytes.fromhex(checksum))
        self._last_bytes[kind] = layout.num_bytes
        self._live.setdefault(version, []).append(segment)
        return WeightManifest(
            version=version,
            base_version=base_version,
            kind=kind,
            transport=TRANSPORT,
            location=str(segment.path),
            num_bytes=layout.num_bytes,
            digest=checksum,
            slots=layout.slots,
            result=result,
        )

    def retire(self, version: int) -> None:
        """Free the version's segments for another; a version that is not held is already retired."""
        for segment in self._live.pop(version, []):
            segment.mark(_FREE, version, 0, bytes(16))
            self._free.append(segment)

    def close(self) -> None:
        """Remove every segment. The directory belongs to whoever made it."""
        for segment in [*chain(*self._live.values()), *self._free]:
            segment.remove()
        self._live.clear()
        self._free.clear()

    def _with_room(self, segment: _Segment | None, num_bytes: int, version: int, kind: str) -> _Segment:
        """The segment that is being written, or a first one, with room for so many bytes."""
        if segment is None:
            segment = self._take(max(num_bytes, self._last_bytes.get(kind, 0)))
            segment.mark(_WRITING, version, 0, bytes(16))
        elif segment.capacity_bytes < num_bytes:
            segment.grow(num_bytes)
        return segment

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
        self._open(capacity_bytes, os.O_CREAT | os.O_EXCL, _POPULATE)

    def grow(self, capacity_bytes: int) -> None:
        """Make the file longer. What is written already is not touched again, so it is not mapped in advance."""
        self._open(capacity_bytes, 0, 0)

    def _open(self, capacity_bytes: int, open_flags: int, map_flags: int) -> None:
        size = HEADER_BYTES + capacity_bytes
        try:
            descriptor = os.open(self.path, os.O_RDWR | open_flags, 0o600)
            try:
                # Reserving the pages turns a full disk into an error here; a hole in the mapping would
                # turn it into SIGBUS at the first write.
                if sys.platform == "linux":
                    present = os.fstat(descriptor).st_size
                    os.posix_fallocate(descriptor, present, size - present)
                else:
                    os.ftruncate(descriptor, size)
                self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | map_flags)
            finally:
                os.close(descriptor)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise WeightSyncError(
                f"cannot map {size} bytes at {self.path} ({error.strerror}; {_free_bytes(self.path.parent)} bytes "
                "are free): make room there or raise the size of /dev/shm"
            ) from error
        self.capacity_bytes = capacity_bytes
        self.payload = np.frombuffer(self._map, np.uint8, offset=HEADER_BYTES)

    def mark(self, state: int, version: int, num_bytes: int, checksum: bytes) -> None:
        _HEADER.pack_into(self._map, 0, _MAGIC, state, version, num_bytes, checksum)

    def remove(self) -> None:
        """The memory is given back once nothing refers to it any more."""
        self.path.unlink(missing_ok=True)


class SharedMemoryReceiver:
    """An engine's end."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._lent: weakref.ref[np.ndarray] | None = None
        self._mapped: dict[str, tuple[int, np.ndarray]] = {}
        """By path: the inode, and the payload as uint8."""

    def receive(self, manifest: WeightManifest) -> Iterator[TensorBlob]:
        """Verifies a private copy of the bundle now, then yields it tensor by tensor.

        The tensors are views of that copy; its memory is used again once none of them is alive.
        """
        check_slots(manifest.slots, manifest.num_bytes)
        private = self._private_memory(manifest.num_bytes)
        try:
            with open(manifest.location, "rb", buffering=0) as file:
                _check_header(file.fileno(), manifest)
                shared = self._map(manifest.location, file.fileno())
                found = copy_and_digest(
                    manifest.version,
                    manifest.slots,
                    views(manifest.slots, shared),
                    views(manifest.slots, private),
                    of="copies",
                )
                if found != manifest.digest:
                    _check_header(file.fileno(), manifest)  # names the cause where the header can tell
                    raise WeightSyncError(
                        f"version {manifest.version} at {manifest.location} does not match its digest: the bytes "
                        "are torn or overwritten; publish the weights again"
                    )
        except FileNotFoundError:
            raise WeightSyncError(
                f"version {manifest.version} is not at {manifest.location}: its segment was removed; "
                "publish the weights again"
            ) from None
        return unpack(manifest.slots, private)

    def close(self) -> None:
        self._memory = self._lent = None
        self._mapped.clear()

    def _map(self, path: str, descriptor: int) -> np.ndarray:
        """uint8, the payload of an open segment. Mappings are kept while the file is there: senders use their
        segments again, and a new mapping costs as much as reading through it."""
        status = os.fstat(descriptor)
        inode, payload = self._mapped.get(path, (-1, _NOTHING))
        if inode != status.st_ino or HEADER_BYTES + len(payload) != status.st_size:
            self._mapped = {p: kept for p, kept in self._mapped.items() if p != path and os.path.exists(p)}
            whole = mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ)
            payload = np.frombuffer(whole, np.uint8, offset=HEADER_BYTES)
            self._mapped[path] = (status.st_ino, payload)
        return payload

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


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free
