"""Which way weights travel and in what form: decided once by the sender, announced in each manifest, followed
by receivers.

The choice follows from where the roles are. On one GPU the bytes stay there and are opened by the other process;
on one machine they go through shared memory, if there is enough of it; else, and between machines, through the folder
that the roles share. ``collective`` broadcasts instead and has to be asked for. A difference is worth its search where
the way is slow and the weights have two bytes: of four-byte weights nearly every one changes with every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from headrace.errors import ConfigError, WeightSyncError
from headrace.protocols import WeightSender
from headrace.types import BundleKind, TensorBlob, TensorPatch, WeightManifest
from headrace.weights import files, shared_memory
from headrace.weights.bundle_sender import Carrier, DeltaSender
from headrace.weights.delta_receiver import changes

Transport = Literal["shared_memory", "cuda_ipc", "files", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the weights of a run travel, with the reason for people."""

    transport: Transport
    why: str
    bundle: BundleKind = "full"
    why_bundle: str = ""


def choose(
    transport: str,
    bundle: str = "auto",
    *,
    device: str,
    item_bytes: int = 2,
    one_machine: bool = True,
    needed_bytes: int = 0,
    shared_bytes: float = math.inf,
) -> Route:
    """``transport`` and ``bundle`` as asked for, ``auto`` included; ``device`` is the kind that trainer and
    engines compute on, ``item_bytes`` the width of a published weight. Versions that are held at once take
    ``needed_bytes``, and ``shared_bytes`` of shared memory are free."""
    route = _way(transport, device=device, one_machine=one_machine)
    if transport == "auto" and route.transport == "shared_memory" and needed_bytes > shared_bytes:
        why = (
            f"shared memory has {shared_bytes / 1e9:.2f} GB free and the versions held at once take "
            f"{needed_bytes / 1e9:.2f}; enlarge /dev/shm for a faster way"
        )
        route = Route(transport="files", why=why)
    if bundle == "delta" and route.transport == "cuda_ipc":
        raise ConfigError(
            "weights.bundle is delta, but weights that stay on the GPU are copied faster than compared: set "
            "weights.bundle to auto"
        )
    if bundle != "auto":
        asked: BundleKind = "delta" if bundle == "delta" else "full"
        return replace(route, bundle=asked, why_bundle="asked for by weights.bundle")
    if route.transport in ("shared_memory", "cuda_ipc"):
        return replace(route, why_bundle="copying all is faster here than finding what changed")
    if item_bytes > 2:
        return replace(
            route, why_bundle=f"of weights of {item_bytes} bytes nearly all change with every step"
        )
    return replace(route, bundle="delta", why_bundle="few weights of two bytes change with a step")


def _way(asked: str, *, device: str, one_machine: bool) -> Route:
    if asked == "cuda_ipc" and (device != "cuda" or not one_machine):
        raise ConfigError(
            "weights.transport is cuda_ipc, but the weights are not on one machine's GPU: set weights.transport "
            "to auto"
        )
    if asked == "shared_memory" and not one_machine:
        raise ConfigError(
            "weights.transport is shared_memory, but the roles are on several machines: set weights.transport to "
            "files or collective"
        )
    if asked == "collective":
        why = "asked for by weights.transport; by gloo, or by NCCL where each end has a GPU of its own"
        return Route(transport="collective", why=why)
    if asked != "auto":
        return Route(transport=asked, why="asked for by weights.transport")  # type: ignore[arg-type]
    if not one_machine:
        return Route(
            transport="files", why="the roles are on several machines, which share the run directory"
        )
    if device == "cuda":
        return Route(transport="cuda_ipc", why="trainer and engines use one GPU, so the bytes stay there")
    return Route(
        transport="shared_memory", why="trainer and engines are on one machine, the weights in its memory"
    )


def weight_sender(
    route: Route,
    *,
    segments: Path,
    folder: Path,
    num_receivers: int = 1,
    deadline_s: float = 60.0,
    growing_segments: bool = False,
    full_bytes: int = 0,
) -> WeightSender:
    """``segments`` is where mapped files may lie, ``folder`` where weights may be written for others to read.
    ``num_receivers`` and ``deadline_s`` are for broadcasts: who is waited for, and how long a collective may take
    before it is given up; ``growing_segments`` is how the process takes its GPU memory (``gpu_segments``), and
    ``full_bytes`` the length of a complete bundle, as far as it is known."""
    if route.transport == "cuda_ipc":
        from headrace.weights.cuda_ipc import CudaIpcSender

        return CudaIpcSender(growing_segments=growing_segments, room_bytes=full_bytes)
    carrier: Carrier
    if route.transport == "collective":
        from headrace.weights.collective import CollectiveSender

        carrier = CollectiveSender(num_receivers=num_receivers, deadline_s=deadline_s)
    elif route.transport == "files":
        carrier = files.FilesSender(folder)
    else:
        carrier = shared_memory.SharedMemorySender(segments)
    return DeltaSender(carrier) if route.bundle == "delta" else carrier


class Fetcher(Protocol):
    """The receiving end of a transport."""

    def receive(self, manifest: WeightManifest) -> Iterator[TensorBlob]: ...

    def close(self) -> None: ...


class TransportReceiver:
    """Receives by whatever transport a manifest names."""

    def __init__(self, others: Mapping[str, Fetcher] | None = None, *, place: Any = None) -> None:
        """``others``: ways that are not a transport's, by the name a manifest gives them. ``place``: the
        torch.device that the engine computes on, where weights from another GPU arrive; None: not known."""
        self._receivers: dict[str, Fetcher] = dict(others or {})
        self._place = place

    def receive(
        self, manifest: WeightManifest, base: Iterable[TensorBlob] = ()
    ) -> Iterator[TensorBlob | TensorPatch]:
        if manifest.transport not in self._receivers:
            self._receivers[manifest.transport] = _receiver(manifest.transport, self._place)
        blobs = self._receivers[manifest.transport].receive(manifest)
        return iter(changes(manifest, blobs, base)) if manifest.kind == "delta" else blobs

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()


def _receiver(transport: str, place: Any) -> Fetcher:
    if transport == shared_memory.TRANSPORT:
        return shared_memory.SharedMemoryReceiver()
    if transport == files.TRANSPORT:
        return files.FilesReceiver()
    if transport == "collective":
        from headrace.weights.collective import CollectiveReceiver

        return CollectiveReceiver(place)
    if transport == "cuda_ipc":
        from headrace.weights.cuda_ipc import CudaIpcReceiver

        return CudaIpcReceiver(place)
    raise WeightSyncError(f"weights were sent by {transport!r}, which this engine does not know; update it")
