"""What form weights are sent in: all of them, or what changed since the version before.

In: versions in order, from the trainer. Out: bundles for a transport, and their manifests. A delta builds on
the version sent last, since updates land in order. An engine that missed one has another base and says so; it
then gets all weights (``kind="full"``), which leaves the base as it is for the others.

The base is a copy of the weights sent last, where the weights are: a sender of deltas takes that much more
memory, on the trainer's device. Where a delta would be larger than the weights, they are sent themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from headrace.types import BundleKind, TensorBlob, WeightManifest
from headrace.weights import delta
from headrace.weights.bundle import chunk_sums, in_threads, joined_digest


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
        tensors = list(blobs)
        if kind is not None and kind != "delta":
            return self._carrier.send(version, tensors, kind=kind)
        base = self._base
        if base is None or not base.fits(tensors):
            self._base = _Base(version, tensors)
            return self._carrier.send(version, tensors)
        base_version = base.version
        parts = base.differences(tensors)
        result = base.advance(version, tensors)
        if sum(part.data.nbytes for part in parts) >= sum(tensor.data.nbytes for tensor in tensors):
            return self._carrier.send(version, tensors)
        return self._carrier.send(version, parts, kind="delta", base_version=base_version, result=result)

    def retire(self, version: int) -> None:
        self._carrier.retire(version)

    def close(self) -> None:
        self._base = None
        self._carrier.close()


class _Base:
    """A copy of the weights that the next delta builds on."""

    def __init__(self, version: int, tensors: Sequence[TensorBlob]) -> None:
        self.version = version
        self._form = _form(tensors)
        self._copies = [_copy(tensor.data) for tensor in tensors]

    def fits(self, tensors: Sequence[TensorBlob]) -> bool:
        """Whether these are other values of the same tensors."""
        return self._form == _form(tensors)

    def differences(self, tensors: Sequence[TensorBlob]) -> list[TensorBlob]:
        pairs = list(zip(self._copies, tensors, strict=True))
        num_bytes = sum(tensor.data.nbytes for tensor in tensors)
        return in_threads(lambda pair: delta.encode(*pair), pairs, num_bytes=num_bytes)

    def advance(self, version: int, tensors: Sequence[TensorBlob]) -> str:
        """Become these weights; returns their digest."""
        self.version = version
        data = [tensor.data for tensor in tensors]
        if all(isinstance(part, np.ndarray) for part in data):
            return joined_digest(version, tensors, chunk_sums(data, self._copies))
        from headrace.weights import device

        for copy, part in zip(self._copies, data, strict=True):
            copy.copy_(part)
        return joined_digest(version, tensors, [device.chunk_sums(copy) for copy in self._copies])


def _form(tensors: Sequence[TensorBlob]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]


def _copy(data: Any) -> Any:
    return data.copy() if isinstance(data, np.ndarray) else data.clone()
