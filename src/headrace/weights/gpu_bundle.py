"""What lies in a bundle's GPU memory, and the digest that says it is whole.

In: tensors on a GPU, a bucket at a time, and the memory for all of them. Out: where each lies, the sums of its words
by chunk, and 32 hex digits over both. Invariant: a bundle has one digest, whatever buckets it was copied in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import WeightSyncError
from headrace.types import TensorBlob, TensorSlot
from headrace.weights.bundle import lay_out

if TYPE_CHECKING:
    from headrace.kernels.checksum import Chunks


class Part:
    """Tensors that are copied together, and where they lie in a buffer."""

    def __init__(self, place: tuple[int, torch.device, list[Any]], bucket: Sequence[TensorBlob]) -> None:
        """``place``: where it starts, on what device, and what it is."""
        self.place = place
        self.start, self.device, _ = place
        slots, num_bytes = lay_out(bucket)
        self.slots = tuple(replace(slot, offset=self.start + slot.offset) for slot in slots)
        self.end = self.start + num_bytes
        self._chunks = _chunks(self.slots, self.device)

    def copied_sums(self, bucket: Sequence[TensorBlob], payload: torch.Tensor) -> torch.Tensor:
        """Copies the tensors into the payload; returns the sums of their chunks."""
        from headrace.kernels.whole_copies import can_be_copied_wide

        sources: list[Any] = [blob.data for blob in bucket]
        if can_be_copied_wide(sources):
            return self._chunks.copied_sums(sources, payload)
        torch._foreach_copy_(_shares(self.slots, payload), sources)
        return self._chunks.sums(payload)


class Checksums:
    """Digests of bundles as they lie, whose slots are usually those of the last one."""

    def __init__(self) -> None:
        self._slots: tuple[TensorSlot, ...] = ()
        self._chunks: Chunks | None = None
        self._table = b""

    def of(self, version: int, slots: tuple[TensorSlot, ...], payload: torch.Tensor) -> str:
        if self._chunks is None or slots != self._slots:
            self._slots, self._table = slots, slot_table(slots)
            self._chunks = _chunks(slots, payload.device)
        return digest(version, self._table, self._chunks.sums(payload))


def digest(version: int, table: bytes, sums: torch.Tensor) -> str:
    """32 hex digits from the sums of every tensor's words by chunk, hashed with the version and the slot table. They
    guard against accidents, as the digest of mapped memory does; the sums are taken where the bytes are."""
    whole = hashlib.blake2b(f"{version} ".encode() + table, digest_size=16)
    whole.update(sums.cpu().numpy().tobytes())
    return whole.hexdigest()


def joined_slots(parts: Sequence[Part]) -> tuple[TensorSlot, ...]:
    slots = tuple(slot for part in parts for slot in part.slots)
    if len({slot.name for slot in slots}) != len(slots):
        raise WeightSyncError("a tensor is in the bundle twice; send shared tensors once")
    return slots


def slot_table(slots: tuple[TensorSlot, ...]) -> bytes:
    return json.dumps([[s.name, s.dtype, list(s.shape), s.offset, s.num_bytes] for s in slots]).encode()


def _chunks(slots: Sequence[TensorSlot], device: torch.device) -> Chunks:
    # Triton is needed on a GPU only.
    from headrace.kernels.checksum import Chunks

    return Chunks([(slot.offset, slot.num_bytes) for slot in slots], device)


def _shares(slots: Sequence[TensorSlot], payload: torch.Tensor) -> list[torch.Tensor]:
    return [payload[slot.offset : slot.offset + slot.num_bytes] for slot in slots]
