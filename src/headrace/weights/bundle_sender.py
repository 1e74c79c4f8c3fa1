"""What form weights are sent in: all of them, or what changed since the version before.

In: versions in order, from the trainer. Out: bundles for a transport, and their manifests. A delta builds on
the version sent last, since updates land in order. An engine that missed one has another base and says so; it
then gets all weights (``kind="full"``), which leaves the base as it is for the others.

The base is a copy of the weights sent last, where the weights are: a sender of deltas takes that much more
memory, on the trainer's device. Tensors are compared with it a bucket at a time and written over it, so that those
which are made for it (gathered from other ranks) never exist all at once. Where a delta would be larger than the
weights, these are sent, from the base.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from headrace.types import BundleKind, TensorBlob, WeightManifest
from headrace.weights import delta
from headrace.weights.bundle import blob_bytes, chunk_sums, in_buckets, in_threads, joined_digest

_BUCKET_BYTES = 256 << 20


class Carrier(Protocol):
    """The sending end of a transport."""

    def send(
        self,
        version: int,
        blobs: Iterable[TensorBlob],
        *,
        kind: BundleKind | None = None,
        base_version: int | None = None,
        result: str = "",
    ) -> WeightManifest: ...

    def retire(self, version: int) -> None: ...

    def close(self) -> None: ...


class DeltaSender:
    """Sends the first version whole, and of later ones what changed."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._base: _Base | None = None

    def send(
        self, version: int, blobs: Iterable[TensorBlob], *, kind: BundleKind | None = None
    ) -> WeightManifest:
        if kind is not None and kind != "delta":
            return self._carrier.send(version, blobs, kind=kind)
        # Until it is whole again it is nobody's base.
        base, self._base = self._base or _Base(), None
        base_version = base.version
        changes = base.advance(version, blobs)
        self._base = base
        if changes is None:
            return self._carrier.send(version, base.tensors)
        return self._carrier.send(
            version, changes, kind="delta", base_version=base_version, result=base.digest
        )

    def retire(self, version: int) -> None:
        self._carrier.retire(version)

    def close(self) -> None:
        self._base = None
        self._carrier.close()


class _Base:
    """A copy of the weights that the next delta builds on."""

    def __init__(self) -> None:
        self.version = -1
        self.tensors: list[TensorBlob] = []
        self.digest = ""

    def advance(self, version: int, blobs: Iterable[TensorBlob]) -> list[TensorBlob] | None:
        """Become these weights; returns what changed, or None where all weights are less, or other tensors."""
        old, self.tensors = self.tensors, []
        sums: list[np.ndarray] = []
        changes: list[TensorBlob] = []
        is_same = bool(old)
        for bucket in in_buckets(blobs, blob_bytes, _BUCKET_BYTES):
            own = old[len(self.tensors) : len(self.tensors) + len(bucket)]
            is_same = is_same and _form(own) == _form(bucket)
            if is_same:
                changes += _differences(own, bucket)
            else:
                own = [replace(blob, data=_room_like(blob.data)) for blob in bucket]
            sums += _written_over(own, bucket)
            self.tensors += own
            del bucket
        self.version, self.digest = version, joined_digest(version, self.tensors, sums)
        num_bytes = sum(map(blob_bytes, self.tensors))
        is_less = is_same and len(self.tensors) == len(old) and sum(map(blob_bytes, changes)) < num_bytes
        return changes if is_less else None


def _differences(own: Sequence[TensorBlob], new: Sequence[TensorBlob]) -> list[TensorBlob]:
    """What changed in each tensor. One that is sent whole will be read where it is about to be copied to."""
    pairs = list(zip(own, new, strict=True))
    found = in_threads(
        lambda pair: delta.encode(pair[0].data, pair[1]), pairs, num_bytes=sum(map(blob_bytes, new))
    )
    return [part if part.form == "sparse" else tensor for part, tensor in zip(found, own, strict=True)]


def _written_over(own: Sequence[TensorBlob], new: Sequence[TensorBlob]) -> list[np.ndarray]:
    """Copies the tensors over those of the base; returns their chunk sums."""
    if all(isinstance(tensor.data, np.ndarray) for tensor in new):
        return chunk_sums([tensor.data for tensor in new], [tensor.data for tensor in own])
    from headrace.weights import device

    for tensor, source in zip(own, new, strict=True):
        tensor.data.copy_(source.data)
    return [device.chunk_sums(tensor.data) for tensor in own]


def _form(tensors: Sequence[TensorBlob]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]


def _room_like(data: Any) -> Any:
    return np.empty_like(data) if isinstance(data, np.ndarray) else data.new_empty(data.shape)
