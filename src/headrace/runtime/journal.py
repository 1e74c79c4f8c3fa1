"""What happened, on disk, before anybody acts on it: an append-only log in numbered segments.

In: records, each a mapping of a ``kind`` and values of the data contract. Out: the same records, in
order, after any crash. Records that belong together (one turn of the event loop) are written as one
frame, all or none of them. A segment starts when a checkpoint is taken and is named by its step, so
recovery reads the segments from the restored checkpoint on. Each frame carries its length and a
checksum. One cut off at the very end is what a killed writer leaves: it is dropped, and the file is
cut there before anything is appended. Damage anywhere else is an error.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace import wire
from headrace.errors import CheckpointError

_FRAME = struct.Struct("<II")

Record = dict[str, Any]
"""A ``kind`` and its fields. Whoever made it does not change it any more."""


class Journal:
    """The writing end."""

    def __init__(self, directory: Path, step: int) -> None:
        self.directory = directory
        self._fd = -1
        self._num_bytes = 0
        self._unwritten = wire.FrameBuilder()
        self._failure: CheckpointError | None = None
        self.cut_off = ""
        """What the last writer left unfinished and was removed, in words; empty: nothing."""
        self.rotate(step)

    def write(self, record: Record) -> bool:
        """Note the record; ``flush`` hands it over. Returns whether it is the first to be noted since the last one."""
        return self._unwritten.add(record) == 1

    def flush(self) -> None:
        """Hand what was noted to the operating system, whole; it then survives the death of this process."""
        self._check()
        if not len(self._unwritten):
            return
        body = self._unwritten.take()
        header = _FRAME.pack(len(body), zlib.crc32(body))
        num_bytes = len(header) + len(body)
        try:
            written = os.writev(self._fd, (header, body))
            if written != num_bytes:
                raise OSError(f"only {written} of {num_bytes} bytes were written")
        except OSError as e:
            # Later records build on the lost ones, and nothing behind a torn frame could be read again.
            self._failure = self._unwritable(e)
            os.ftruncate(self._fd, self._num_bytes)
            raise self._failure from e
        self._num_bytes += written

    def rotate(self, step: int) -> int:
        """Continue in the segment of ``step``; returns how many bytes it holds already."""
        self._check()
        self.close()
        path = segment_path(self.directory, step)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._num_bytes = sum(size for _, size in _scan(path, last=True)) if path.exists() else 0
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            num_torn = os.fstat(self._fd).st_size - self._num_bytes
            os.ftruncate(self._fd, self._num_bytes)
        except OSError as e:
            raise self._unwritable(e) from e
        if num_torn:
            self.cut_off = (
                f"{path} ended in a record that was cut off after {num_torn} bytes; they were removed"
            )
        return self._num_bytes

    def prune(self, before_step: int) -> None:
        """Remove the segments that no kept checkpoint needs."""
        for step in segment_steps(self.directory):
            if step < before_step:
                segment_path(self.directory, step).unlink()

    def close(self) -> None:
        if self._fd >= 0:
            try:
                self.flush()
            finally:
                os.close(self._fd)
                self._fd = -1

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"the journal in {self.directory} cannot be written ({error}); "
            "free some disk space and resume the run"
        )


def segment_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}.journal"


def segment_steps(directory: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in directory.glob("step-*.journal"))


def read(directory: Path, from_step: int, *, skip_bytes: int = 0) -> Iterator[dict[str, Any]]:
    """Every whole record written since the checkpoint of ``from_step``, which found ``skip_bytes`` of older
    ones in its own segment."""
    steps = [step for step in segment_steps(directory) if step >= from_step]
    for step in steps:
        start = skip_bytes if step == from_step else 0
        for body, _ in _scan(segment_path(directory, step), last=step == steps[-1], start=start):
            yield from wire.decode(body)


def salvage(path: Path, *, start: int = 0) -> Iterator[tuple[int, bytes | None]]:
    """(offset, body) of each whole frame, and (offset, None) where bytes belong to none: for those who look at a
    journal and must not stop at damage. What lies behind it is found again by its checksum."""
    data, at = path.read_bytes(), start
    while at < len(data):
        body = _body(data, at)
        if body is not None:
            yield at, body
            at += _FRAME.size + len(body)
        else:
            yield at, None
            at = next((i for i in range(at + 1, len(data)) if _body(data, i) is not None), len(data))


def _body(data: bytes, at: int) -> bytes | None:
    """Of the frame that begins at ``at``; None: none does."""
    body_at = at + _FRAME.size
    if body_at >= len(data):
        return None
    length, checksum = _FRAME.unpack_from(data, at)
    if not 0 < length <= len(data) - body_at:
        return None
    body = data[body_at : body_at + length]
    return body if zlib.crc32(body) == checksum else None


def _scan(path: Path, *, last: bool, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """(body, bytes on disk) of each whole frame; only the last segment may end in a torn one, or in zeros: a power
    failure leaves them where a file had grown and its bytes were not written."""
    data, at = path.read_bytes(), start
    while at < len(data):
        body_at = at + _FRAME.size
        if body_at <= len(data):
            length, checksum = _FRAME.unpack_from(data, at)
            body = data[body_at : body_at + length]
            if 0 < length == len(body) and zlib.crc32(body) == checksum:
                yield body, _FRAME.size + length
                at = body_at + length
                continue
            torn = body_at + length >= len(data) or not any(data[at:])
        else:
            torn = True
        if last and torn:
            return
        raise CheckpointError(
            f"{path} is damaged at byte {at}; restore that file from a backup, "
            "or start a new run from the last checkpoint"
        )
