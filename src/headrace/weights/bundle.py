"""How a bundle of tensors lies in one run of bytes, and the digest that says it is whole.

In: named tensors as raw bytes. Out: the slot of each, the length of the payload, its digest, and tensors
again. Invariant: the digest covers the version and every tensor's name, dtype, shape, form and bytes, and
nothing else, so the same tensors have the same digest wherever and however they lie.

The digest guards against accidents (a torn, truncated or reused segment, a wrong base), not against a
forger: who can write the bytes owns the run. So words are added up by chunk, at the speed of memory, and
only the sums are hashed. A word counts by its place in a row of 16 KiB, which makes words that changed
places visible too, unless they moved by whole rows within one chunk.
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
ROW_WORDS = 2048
PIECE_BYTES = CHUNK_BYTES // 4
"""What is copied at a time: small enough to be in its core's cache still when it is summed."""
_PLACES = np.arange(1, 2 * ROW_WORDS, 2, dtype=np.uint64)
_BLOCK_BYTES = 8 * CHUNK_BYTES
"""What a thread takes at a time."""
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
        self.num_bytes += -(-slot.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return slot


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
    """uint64, one number for each chunk of each part. With ``targets`` the parts are copied there, and each piece
    is summed right after: ``of`` "sources" where nobody else writes to them (a copy may go past the cache, a
    source never does), else "copies"."""
    blocks = [
        (number, start) for number, part in enumerate(parts) for start in range(0, len(part), _BLOCK_BYTES)
    ]

    def work(block: tuple[int, int]) -> list[np.uint64]:
        number, start = block
        sums = []
        for chunk in _slices(start, min(start + _BLOCK_BYTES, len(parts[number]))):
            target = None if targets is None else targets[number][chunk]
            sums.append(_sum_of_chunk(parts[number][chunk], target, of))
        return sums

    found = in_threads(work, blocks, num_bytes=sum(len(part) for part in parts))
    sums = [np.zeros(0, np.uint64)] * len(parts)
    for number, several in groupby(zip(blocks, found, strict=True), key=lambda pair: pair[0][0]):
        sums[number] = np.array([one for _, block in several for one in block], np.uint64)
    return sums


def in_threads(work: Callable[[T], U], items: Sequence[T], *, num_bytes: int) -> list[U]:
    """``work`` of each item in order. Several threads share it if it is about more than a few bytes: numpy
    does its part outside the interpreter's lock."""
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    if num_threads == 1 or num_bytes <= _BLOCK_BYTES:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
        return list(pool.map(work, items))


def _slices(start: int, end: int) -> Iterator[slice]:
    return (slice(chunk, min(chunk + CHUNK_BYTES, end)) for chunk in range(start, end, CHUNK_BYTES))


def _sum_of_chunk(data: np.ndarray, target: np.ndarray | None, of: Summed) -> np.uint64:
    """Sums wrap around."""
    columns = np.zeros(ROW_WORDS, np.uint64)
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        if target is not None:
            copy = target[start : start + PIECE_BYTES]
            np.copyto(copy, piece)
            piece = copy if of == "copies" else piece
        columns += _rows(piece).sum(axis=0, dtype=np.uint64)
    weighed: np.uint64 = (columns * _PLACES).sum(dtype=np.uint64)
    return weighed


def _rows(piece: np.ndarray) -> np.ndarray:
    """uint64 [rows, words of a row]; a last, shorter row is filled up with zeros."""
    missing = -len(piece) % (8 * ROW_WORDS)
    if missing:
        piece = np.concatenate((piece, np.zeros(missing, np.uint8)))
    return piece.view(np.uint64).reshape(-1, ROW_WORDS)


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
