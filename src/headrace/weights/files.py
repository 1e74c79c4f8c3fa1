"""Weights as files in a folder that sender and receivers share, on one machine or several.

In, at the trainer: named tensors. Out, at each engine: the same tensors, verified whole.

    FOLDER/v00000012-full-3/     one bundle: version, kind, and a number that no other bundle had
        bucket-0000.safetensors  whole tensors, up to 1 GiB a file
        manifest                 the announcement, as ``wire`` writes it

Invariant: a bundle's directory has its name only when it is whole and on disk. It is written under another
name, the manifest last, every file is flushed to the disk, and then the directory is renamed. A version
stays until ``retire``; the newest full one stays beyond that, for engines that join later (``newest``). What
a sender that died has left is removed by the next one.

Receivers copy the bytes out and verify the copy, so a file that vanishes or changes while it is read is an
error and nothing else. Folders on a network may show a directory late, so a receiver waits for one that was
announced.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import numpy as np

from headrace import wire
from headrace.errors import WeightSyncError
from headrace.types import BundleKind, TensorBlob, TensorSlot, WeightManifest
from headrace.weights.bundle import (
    Layout,
    blob_bytes,
    check_slots,
    chunk_sums,
    digest,
    in_buckets,
    joined_digest,
    on_host,
    unpack,
    views,
)

TRANSPORT = "files"
MANIFEST = "manifest"
_BUCKET_BYTES = 1 << 30
_BUNDLE = re.compile(r"v(\d{8,})-(full|adapter|delta)-(\d+)")
_UNFINISHED = ".writing-"


class FilesSender:
    """The trainer's end; ``folder`` is its own, and what earlier senders left there is removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._live: dict[int, list[Path]] = {}
        """By version."""
        self._newest_full: tuple[int, Path] | None = None
        bundles = list(_bundles(self._folder))
        self._num_sent = max((number for _, _, number, _ in bundles), default=0)
        for path in [bundle[-1] for bundle in bundles] + list(self._folder.glob(f"{_UNFINISHED}*")):
            shutil.rmtree(path, ignore_errors=True)

    def send(
        self,
        version: int,
        blobs: Iterable[TensorBlob],
        *,
        kind: BundleKind | None = None,
        base_version: int | None = None,
        result: str = "",
    ) -> WeightManifest:
        """Write the tensors out; they stay until ``retire(version)``, also where the version is sent again: somebody
        may still be reading what was sent first."""
        kind = kind or "full"
        self._num_sent += 1
        path = self._folder / f"v{version:08d}-{kind}-{self._num_sent}"
        announced = WeightManifest(
            version=version,
            base_version=base_version,
            kind=kind,
            transport=TRANSPORT,
            location=str(path),
            num_bytes=0,
            digest="",
            slots=(),
            result=result,
        )
        try:
            manifest = self._write(path, announced, blobs)
        except OSError as error:
            raise WeightSyncError(
                f"cannot write version {version} to {self._folder} ({error.strerror}); make room there or choose "
                "another weights.transport"
            ) from error
        self._live.setdefault(version, []).append(path)
        if kind == "full":
            self._keep_newest(version, path)
        return manifest

    def retire(self, version: int) -> None:
        """Remove the version's files; a version that is not held is already retired."""
        for path in self._live.pop(version, []):
            if self._newest_full is None or path != self._newest_full[1]:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove every bundle. The folder itself stays."""
        self._newest_full = None
        for version in list(self._live):
            self.retire(version)
        for *_, path in list(_bundles(self._folder)):
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, path: Path, announced: WeightManifest, blobs: Iterable[TensorBlob]) -> WeightManifest:
        """Returns the announcement with what the tensors turned out to be. They are taken a bucket at a time, so
        that those which are made for it never exist all at once."""
        unfinished = self._folder / f"{_UNFINISHED}{os.getpid()}-{self._num_sent}"
        unfinished.mkdir()
        layout, names = Layout(), map(_bucket_name, count())
        sums: list[np.ndarray] = []
        try:
            for bucket in in_buckets(blobs, blob_bytes, _BUCKET_BYTES):
                slots, parts = layout.add(bucket), on_host(bucket)
                _write_file(unfinished / next(names), [_header(slots), *parts])
                sums += chunk_sums(parts)
                del bucket, parts
            checksum = joined_digest(announced.version, layout.slots, sums)
            manifest = replace(announced, num_bytes=layout.num_bytes, digest=checksum, slots=layout.slots)
            _write_file(unfinished / MANIFEST, [wire.encode(manifest)])
            _flush_directory(unfinished)
            unfinished.rename(path)
            _flush_directory(self._folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return manifest

    def _keep_newest(self, version: int, path: Path) -> None:
        previous = self._newest_full
        self._newest_full = (version, path)
        if previous is not None and previous[1] not in chain(*self._live.values()):
            shutil.rmtree(previous[1], ignore_errors=True)


class FilesReceiver:
    """An engine's end."""

    def __init__(self, *, visible_s: float = 10.0) -> None:
        """``visible_s``: how long a directory that was announced may take to appear here."""
        self._visible_s = visible_s

    def receive(self, manifest: WeightManifest) -> Iterator[TensorBlob]:
        """Verifies a copy of the bundle now, then yields it tensor by tensor."""
        check_slots(manifest.slots, manifest.num_bytes)
        path = Path(manifest.location)
        self._wait_for(path, manifest)
        payload = np.zeros(manifest.num_bytes, np.uint8)
        parts = views(manifest.slots, payload)
        try:
            placed = zip(manifest.slots, parts, strict=True)
            for number, bucket in enumerate(
                in_buckets(placed, lambda pair: pair[0].num_bytes, _BUCKET_BYTES)
            ):
                _read_bucket(path / _bucket_name(number), bucket)
        except FileNotFoundError:
            raise WeightSyncError(_gone(manifest)) from None
        if digest(manifest.version, manifest.slots, parts) != manifest.digest:
            raise WeightSyncError(
                f"version {manifest.version} in {path} does not match its digest: a file is damaged; publish the "
                "weights again"
            )
        return unpack(manifest.slots, payload)

    def close(self) -> None: ...

    def _wait_for(self, path: Path, manifest: WeightManifest) -> None:
        deadline = time.monotonic() + self._visible_s
        while not (path / MANIFEST).exists():
            # A newer bundle being visible, this one was there and has been removed.
            number = _number(path)
            there = path.parent.is_dir()
            newer = there and any(other > number for _, _, other, _ in _bundles(path.parent))
            if newer or time.monotonic() >= deadline:
                raise WeightSyncError(_gone(manifest))
            time.sleep(0.02)


def newest(folder: Path) -> WeightManifest | None:
    """The newest full bundle in a folder, for an engine that joins late; None: there is none."""
    full = sorted(
        (version, number, path) for version, kind, number, path in _bundles(folder) if kind == "full"
    )
    for *_, path in reversed(full):
        try:
            manifest: WeightManifest = wire.decode((path / MANIFEST).read_bytes())
        except FileNotFoundError:
            continue  # removed meanwhile; an older one is worse than none only in age
        # The folder may be mounted elsewhere on the sender's machine.
        return replace(manifest, location=str(path))
    return None


def _bundles(folder: Path) -> Iterator[tuple[int, str, int, Path]]:
    """(version, kind, number, path) of what lies whole in the folder."""
    for path in folder.iterdir():
        match = _BUNDLE.fullmatch(path.name)
        if match is not None:
            yield int(match[1]), match[2], int(match[3]), path


def _number(path: Path) -> int:
    match = _BUNDLE.fullmatch(path.name)
    return int(match[3]) if match is not None else 0


def _bucket_name(number: int) -> str:
    return f"bucket-{number:04d}.safetensors"


def _header(slots: Sequence[TensorSlot]) -> bytes:
    """The head of a safetensors file; what is sparse is named as the bytes it is."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for slot in slots:
        dense = slot.form == "dense"
        table[slot.name] = {
            "dtype": slot.dtype if dense else "U8",
            "shape": list(slot.shape) if dense else [slot.num_bytes],
            "data_offsets": [end, end + slot.num_bytes],
        }
        end += slot.num_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_bucket(path: Path, bucket: Sequence[tuple[TensorSlot, np.ndarray]]) -> None:
    """Fill each slot's array from one file. Its head must be the one these slots have."""
    head = _header([slot for slot, _ in bucket])
    with open(path, "rb", buffering=0) as file:
        if file.read(len(head)) != head:
            raise WeightSyncError(f"{path} holds other tensors than announced; publish the weights again")
        for slot, target in bucket:
            num_read = 0
            while num_read < slot.num_bytes:
                num_new = file.readinto(target[num_read:].data)
                if not num_new:
                    raise WeightSyncError(f"{path} ends within {slot.name!r}; publish the weights again")
                num_read += num_new


def _write_file(path: Path, parts: Iterable[bytes | np.ndarray]) -> None:
    with open(path, "wb", buffering=0) as file:
        for part in parts:
            rest = memoryview(part) if isinstance(part, bytes) else part.data
            while len(rest):
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _gone(manifest: WeightManifest) -> str:
    return (
        f"version {manifest.version} is not in {manifest.location}: it was retired, or the folder is not shared; "
        "publish the weights again"
    )
