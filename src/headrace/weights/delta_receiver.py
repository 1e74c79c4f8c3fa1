"""A delta made into what an engine changes, after a look at what that engine would then compute with.

In: the verified blobs of a delta, and the engine's own weights. Out: patches and whole tensors, one for each
tensor of the model. Invariant: nothing is yielded unless the engine's weights, changed so, have the digest that
the sender took of its own. Each tensor is copied, changed and summed in turn, so the check costs the memory of
the largest one; the engine itself then writes only what changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from headrace.errors import WeightSyncError
from headrace.types import TensorBlob, TensorPatch, WeightManifest
from headrace.weights import delta
from headrace.weights.bundle import chunk_sums, in_threads, joined_digest


def changes(
    manifest: WeightManifest, blobs: Iterable[TensorBlob], base: Iterable[TensorBlob]
) -> list[TensorBlob | TensorPatch]:
    """What the delta changes in ``base``. Raises WeightSyncError if it was made for other weights."""
    arrived, present = list(blobs), {tensor.name: tensor for tensor in base}
    unknown = [blob.name for blob in arrived if blob.name not in present]
    if unknown or len(arrived) != len(present):
        raise WeightSyncError(
            f"the delta of version {manifest.version} is for {len(arrived)} tensors and the engine has "
            f"{len(present)} (unknown here: {unknown[:3]}); sender and engine must load the same model"
        )
    pairs = [(blob, present[blob.name].data) for blob in arrived]
    on_host = all(isinstance(old, np.ndarray) for _, old in pairs)
    # Work for a GPU is queued by one thread, in order.
    num_bytes = sum(old.nbytes for _, old in pairs) if on_host else 0
    with nullcontext() if on_host else _beside(pairs[0][1]):
        found = in_threads(lambda pair: _change(*pair), pairs, num_bytes=num_bytes)
    tensors = [TensorBlob(name=b.name, dtype=b.dtype, shape=b.shape, data=None) for b in arrived]
    if joined_digest(manifest.version, tensors, [sums for _, sums in found]) != manifest.result:
        raise WeightSyncError(
            f"the delta of version {manifest.version} does not lead from this engine's weights of version "
            f"{manifest.base_version} to those of the trainer; send a full bundle"
        )
    return [update for update, _ in found]


def _change(blob: TensorBlob, old: Any) -> tuple[TensorBlob | TensorPatch, np.ndarray]:
    """What to do to one tensor, and the chunk sums it will then have."""
    if blob.form == "dense":
        return blob, chunk_sums([blob.data])[0]
    patch = delta.decode(blob, old)
    if isinstance(old, np.ndarray):
        if len(patch.places):
            old = old.copy()
            old.view(patch.bits.dtype)[patch.places] = patch.bits
        return patch, chunk_sums([old])[0]
    from headrace.weights import device

    patch = device.uploaded(patch, old.device)
    return patch, device.chunk_sums(device.patched(old, patch) if len(patch.places) else old)


def _beside(tensor: Any) -> AbstractContextManager[None]:
    from headrace.weights import device

    return device.beside(tensor)
