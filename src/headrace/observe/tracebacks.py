"""Tracebacks in a file for people: what environments, rewards and judges raised, as Python prints it.

In: events. Out: the ``traceback`` of those that have one, under a line that says what it is about. The file is there
only if there was something to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import CheckpointError
from headrace.observe.progress import message


class TracebackSink:
    """Appends to ``path``, whose folder is made."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        text = fields.get("traceback")
        if not text:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{message(event, fields)}\n{text}\n")
        except OSError as error:
            raise CheckpointError(
                f"{self._path} cannot be written: {error.strerror}; free space and resume the run"
            ) from error

    def close(self) -> None:
        """Nothing is held open."""
