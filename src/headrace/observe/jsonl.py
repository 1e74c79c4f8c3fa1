"""Events on disk: one JSON object a line, appended and flushed as they happen.

In: events. Out: ``{"time": ..., "event": ..., <fields>}`` lines in a file that a resumed run goes on with.
Invariant: every line is valid JSON (a non-finite number is written as null), except one that a
killed process was in the middle of; the next run starts on a new line, and ``read_events`` skips it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import CheckpointError


class JsonlSink:
    """Appends events to ``path``; the folder must exist."""

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self._clock = clock
        try:
            self._mid_line = _ends_mid_line(self._path)
            # Unbuffered: an event is on disk when emit returns, and a full disk leaves nothing to fail later.
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise CheckpointError(f"event file {path} cannot be opened: {error.strerror}") from error

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        line = {"time": round(self._clock(), 3), "event": event, **fields}
        self._write(json.dumps(plain(line), separators=(",", ":"), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        pending = memoryview(b"\n" + line if self._mid_line else line)
        self._mid_line = True
        try:
            while pending:
                pending = pending[self._file.write(pending) :]
        except OSError as error:
            raise CheckpointError(
                f"event file {self._path} cannot be written: {error.strerror}; free space and resume the run"
            ) from error
        self._mid_line = False


def read_events(path: str | Path) -> Iterator[dict[str, Any]]:
    """The events of a file, oldest first, without lines that a killed process left half written."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(event, dict):
                yield event


def plain(value: Any) -> Any:
    """``value`` as JSON types: arrays become lists, carriers mappings, non-finite numbers None."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return str(value)


def _ends_mid_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
