"""How much GPU memory a measurement needed, whichever processes took it."""

from __future__ import annotations

import threading

import torch


class MemoryWatch:
    """The most memory in use on the GPU by all processes, looked at ten times a second; without a GPU none."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        if torch.cuda.is_available():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            free, total = torch.cuda.mem_get_info()
            self.peak_bytes = max(self.peak_bytes, total - free)
