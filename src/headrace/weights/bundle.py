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
from operator import itemgetter
from typing import TypeVar

import numpy as np

from headrace.errors import WeightSyncError
from headrace.types import TensorBlob, TensorSlot

T = TypeVar("T")
U = TypeVar("U")

ALIGNMENT_BYTES = 64
CHUNK_BYTES = 1 << 20
ROW_WORDS = 2048
_ROWS = CHUNK_BYTES // 8 // ROW_WORDS
_PLACES = np.arange(1, 2 * ROW_WORDS, 2, dtype=np.uint64)
_BLOCK_BYTES = 32 * CHUNK_BYTES
"""Large enough that copies go past the cache."""
_MAX_THREADS = 4


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
                name=blob.name,
                dtype=blob.dtype,
                shape=blob.shape,
                offset=end,
                num_bytes=blob.data.nbytes,
                form=blob.form,
            )
        )
        end += -(-blob.data.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(slots), end


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
    version: int, slots: Sequence[TensorSlot], sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]
) -> str:
    """Copy every source to its target and return the digest of the copies."""
    return joined_digest(version, slots, chunk_sums(sources, targets))


def joined_digest(
    version: int, tensors: Sequence[TensorSlot | TensorBlob], sums: Sequence[np.ndarray]
) -> str:
    """The digest of tensors whose chunk sums are known."""
    table = [version, [[t.name, t.dtype, list(t.shape), t.form] for t in tensors]]
    whole = hashlib.blake2b(json.dumps(table).encode(), digest_size=16)
    for part in sums:
        whole.update(part.tobytes())
    return whole.hexdigest()


def chunk_sums(parts: Sequence[np.ndarray], targets: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
    """uint64, one number for each chunk of each part. With ``targets`` the parts are copied there first, and
    the copies are what is summed."""
    blocks = [
        (number, start) for number, part in enumerate(parts) for start in range(0, len(part), _BLOCK_BYTES)
    ]

    def work(block: tuple[int, int]) -> np.ndarray:
        number, start = block
        data = parts[number][start : start + _BLOCK_BYTES]
        if targets is not None:
            target = targets[number][start : start + _BLOCK_BYTES]
            np.copyto(target, data)
            data = target
        return _sums_of_block(data)

    found = in_threads(work, blocks, num_bytes=sum(len(part) for part in parts))
    sums = [np.zeros(0, np.uint64)] * len(parts)
    for number, several in groupby(zip(blocks, found, strict=True), key=lambda pair: pair[0][0]):
        sums[number] = np.concatenate(list(map(itemgetter(1), several)))
    return sums


def in_threads(work: Callable[[T], U], items: Sequence[T], *, num_bytes: int) -> list[U]:
    """``work`` of each item in order. Several threads share it if it is about more than a few bytes: numpy
    does its part outside the interpreter's lock."""
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    if num_threads == 1 or num_bytes <= _BLOCK_BYTES:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
        return list(pool.map(work, items))


def _sums_of_block(data: np.ndarray) -> np.ndarray:
    """uint64, one for each chunk; a last, shorter chunk counts as if it ended in zeros."""
    num_whole = len(data) // CHUNK_BYTES
    whole = _sums_of_chunks(data[: num_whole * CHUNK_BYTES])
    if len(data) == num_whole * CHUNK_BYTES:
        return whole
    rest = data[num_whole * CHUNK_BYTES :]
    row_bytes = 8 * ROW_WORDS
    padded = np.zeros(-(-len(rest) // row_bytes) * row_bytes, np.uint8)
    padded[: len(rest)] = rest
    return np.append(whole, _weighed(padded.view(np.uint64).reshape(1, -1, ROW_WORDS)))


def _sums_of_chunks(data: np.ndarray) -> np.ndarray:
    if data.ctypes.data % 8:
        data = data.copy()
    return _weighed(data.view(np.uint64).reshape(-1, _ROWS, ROW_WORDS))


def _weighed(words: np.ndarray) -> np.ndarray:
    """[chunks, rows, words of a row] -> [chunks]; sums wrap around."""
    columns: np.ndarray = words.sum(axis=1, dtype=np.uint64)
    weighed: np.ndarray = (columns * _PLACES).sum(axis=1, dtype=np.uint64)
    return weighed


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
