"""Which way weights travel: decided once by the sender, announced in each manifest, followed by receivers.

On a GPU the bytes stay there and are opened by the other process; from a CPU they go through shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.errors import WeightSyncError
from headrace.protocols import WeightReceiver, WeightSender
from headrace.types import TensorBlob, WeightManifest
from headrace.weights import shared_memory


def weight_sender(device_kind: str, segments: Path) -> WeightSender:
    """The sender for weights on this kind of device; ``segments`` is where mapped files may lie."""
    if device_kind == "cuda":
        from headrace.weights.cuda_ipc import CudaIpcSender

        return CudaIpcSender()
    return shared_memory.SharedMemorySender(segments)


class TransportReceiver:
    """Receives by whatever transport a manifest names."""

    def __init__(self) -> None:
        self._receivers: dict[str, WeightReceiver] = {}

    def receive(self, manifest: WeightManifest) -> Iterator[TensorBlob]:
        if manifest.transport not in self._receivers:
            self._receivers[manifest.transport] = _receiver(manifest.transport)
        return self._receivers[manifest.transport].receive(manifest)

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()


def _receiver(transport: str) -> WeightReceiver:
    if transport == shared_memory.TRANSPORT:
        return shared_memory.SharedMemoryReceiver()
    if transport == "cuda_ipc":
        from headrace.weights.cuda_ipc import CudaIpcReceiver

        return CudaIpcReceiver()
    raise WeightSyncError(f"weights were sent by {transport!r}, which this engine does not know; update it")
