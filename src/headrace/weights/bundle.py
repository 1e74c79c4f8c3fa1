"""How a bundle of tensors lies in one run of bytes, and the digest that says it is whole.

In: named tensors as raw bytes. Out: the slot of each, the length of the payload, its digest, and tensors
again. Invariant: the digest covers the version and every tensor's name, dtype, shape, form and bytes, and
nothing else, so the same tensors have the same digest wherever and however they lie.

The digest guards against accidents (a torn, truncated or reused segment, a wrong base), not against a
forger: who can write the bytes owns the run. So words are added up by chunk, at the speed of memory, and
only the sums are hashed, in order. Chunks that changed places are noticed; words that did within one chunk
of a tensor are not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Literal, TypeVar

import numpy as np

from headrace.errors import WeightSyncError
from headrace.types import TensorBlob, TensorSlot

T = TypeVar("T")
U = TypeVar("U")

Summed = Literal["sources", "copies"]

ALIGNMENT_BYTES = 64
CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 16 * CHUNK_BYTES
"""What a thread takes at a time; copies of a few megabytes and less would read what they write over."""
_MAX_THREADS = 4


class Layout:
    """Aligned slots one after the other, as tensors come."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._slots: dict[str, TensorSlot] = {}

    @property
    def slots(self) -> tuple[TensorSlot, ...]:
        return tuple(self._slots.values())

    def add(self, blobs: Iterable[TensorBlob]) -> list[TensorSlot]:
        """The slots of the next tensors."""
        return [self._add(blob) for blob in blobs]

    def _add(self, blob: TensorBlob) -> TensorSlot:
        if blob.name in self._slots:
            raise WeightSyncError(f"tensor {blob.name!r} is in the bundle twice; send shared tensors once")
        slot = TensorSlot(
            name=blob.name,
            dtype=blob.dtype,
            shape=blob.shape,
            offset=self.num_bytes,
            num_bytes=blob.data.nbytes,
            form=blob.form,
        )
        self._slots[blob.name] = slot
        self.num_bytes += aligned(slot.num_bytes)
        return slot


def aligned(num_bytes: int) -> int:
    """What a tensor of so many bytes takes in a bundle."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def lay_out(blobs: Sequence[TensorBlob]) -> tuple[tuple[TensorSlot, ...], int]:
    """The slots of a whole bundle, and the length of its payload."""
    layout = Layout()
    layout.add(blobs)
    return layout.slots, layout.num_bytes


def in_buckets(items: Iterable[T], num_bytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """The items in order, in lists of up to ``limit`` bytes or of one larger item. A caller that drops its list
    before it asks for the next never holds two."""
    bucket: list[T] = []
    held_bytes = 0
    for item in items:
        if bucket and held_bytes + num_bytes(item) > limit:
            full, bucket, held_bytes = bucket, [], 0
            yield full
            del full
        bucket.append(item)
        held_bytes += num_bytes(item)
        del item
    if bucket:
        yield bucket


def blob_bytes(blob: TensorBlob) -> int:
    num_bytes: int = blob.data.nbytes
    return num_bytes


def views(slots: Sequence[TensorSlot], payload: np.ndarray) -> list[np.ndarray]:
    """uint8, each slot's share of the payload."""
    return [payload[slot.offset : slot.offset + slot.num_bytes] for slot in slots]


def on_host(blobs: Iterable[TensorBlob]) -> list[np.ndarray]:
    """uint8, the bytes of each blob in this process's memory; those on a GPU are copied here."""
    return [blob.data if isinstance(blob.data, np.ndarray) else blob.data.cpu().numpy() for blob in blobs]


def digest(version: int, tensors: Sequence[TensorSlot | TensorBlob], parts: Sequence[np.ndarray]) -> str:
    """32 hex digits over what the tensors are (``tensors``) and hold (``parts``, uint8)."""
    return joined_digest(version, tensors, chunk_sums(parts))


def copy_and_digest(
    version: int,
    slots: Sequence[TensorSlot],
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    *,
    of: Summed,
) -> str:
    """Copy every source to its target and return the digest of either."""
    return joined_digest(version, slots, chunk_sums(sources, targets, of=of))


def joined_digest(
    version: int, tensors: Sequence[TensorSlot | TensorBlob], sums: Sequence[np.ndarray]
) -> str:
    """The digest of tensors whose chunk sums are known."""
    table = [version, [[t.name, t.dtype, list(t.shape), t.form] for t in tensors]]
    whole = hashlib.blake2b(json.dumps(table).encode(), digest_size=16)
    for part in sums:
        whole.update(part.tobytes())
    return whole.hexdigest()


def chunk_sums(
    parts: Sequence[np.ndarray],
    targets: Sequence[np.ndarray] | None = None,
    *,
    of: Summed = "sources",
) -> list[np.ndarray]:
    """uint64, one number for each chunk of each part. With ``targets`` the parts are copied there, and ``of`` says
    which side is summed: "sources" where nobody else writes to them, else "copies"."""
    blocks = [
        (number, start) for number, part in enumerate(parts) for start in range(0, len(part), _BLOCK_BYTES)
    ]

    def work(block: tuple[int, int]) -> np.ndarray:
        number, start = block
        summed = parts[number][start : start + _BLOCK_BYTES]
        if targets is not None:
            copy = targets[number][start : start + _BLOCK_BYTES]
            np.copyto(copy, summed)
            summed = copy if of == "copies" else summed
        return _sums_of_block(summed)

    found = in_threads(work, blocks, num_bytes=sum(len(part) for part in parts))
    sums = [np.zeros(0, np.uint64)] * len(parts)
    for number, several in groupby(zip(blocks, found, strict=True), key=lambda pair: pair[0][0]):
        sums[number] = np.concatenate([block for _, block in several])
    return sums


def in_threads(work: Callable[[T], U], items: Sequence[T], *, num_bytes: int) -> list[U]:
    """``work`` of each item in order. Several threads share it if it is about more than a few bytes: numpy
    does its part outside the interpreter's lock."""
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    if num_threads == 1 or num_bytes <= _BLOCK_BYTES:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
        return list(pool.map(work, items))


def _sums_of_block(block: np.ndarray) -> np.ndarray:
    """Of its chunks; sums wrap around, and a last, shorter word is filled up with zeros."""
    num_whole = len(block) // CHUNK_BYTES * CHUNK_BYTES
    sums = block[:num_whole].view(np.uint64).reshape(-1, CHUNK_BYTES // 8).sum(axis=1, dtype=np.uint64)
    rest = block[num_whole:]
    if not len(rest):
        return sums
    missing = -len(rest) % 8
    words = np.concatenate((rest, np.zeros(missing, np.uint8))) if missing else rest
    return np.append(sums, words.view(np.uint64).sum(dtype=np.uint64))


def check_slots(slots: Sequence[TensorSlot], num_bytes: int) -> None:
    """Raises when a slot reaches outside the payload."""
    for slot in slots:
        if slot.offset < 0 or slot.num_bytes < 0 or slot.offset + slot.num_bytes > num_bytes:
            raise WeightSyncError(
                f"tensor {slot.name!r} lies outside its bundle of {num_bytes} bytes; publish again"
            )


def unpack(slots: Sequence[TensorSlot], payload: np.ndarray) -> Iterator[TensorBlob]:
    """The tensors of a payload (uint8), as views of it."""
    for slot, data in zip(slots, views(slots, payload), strict=True):
        yield TensorBlob(name=slot.name, dtype=slot.dtype, shape=slot.shape, data=data, form=slot.form)
