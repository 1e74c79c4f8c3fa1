from __future__ import annotations

import numpy as np
import pytest

from headrace.types import TensorBlob
from headrace.weights.bundle import CHUNK_BYTES, chunk_sums, digest, lay_out

LENGTHS = (0, 1, 8, 4096, 4099, CHUNK_BYTES - 8, CHUNK_BYTES, 17 * CHUNK_BYTES + 77)


def written_out(part: np.ndarray) -> list[int]:
    """Each chunk's words added up, modulo 2^64."""
    words = np.zeros(-(-len(part) // CHUNK_BYTES) * CHUNK_BYTES, np.uint8)
    words[: len(part)] = part
    return [int(total) for total in words.view(np.uint64).reshape(-1, CHUNK_BYTES // 8).sum(axis=1)]


@pytest.fixture(scope="module")
def parts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    odd_address = rng.integers(0, 256, CHUNK_BYTES + 10, dtype=np.uint8)[1:]
    return [*(rng.integers(0, 256, length, dtype=np.uint8) for length in LENGTHS), odd_address]


def test_sums_are_those_of_the_definition(parts):
    assert [list(map(int, sums)) for sums in chunk_sums(parts)] == [written_out(part) for part in parts]


@pytest.mark.parametrize("of", ["sources", "copies"])
def test_parts_are_copied_and_summed_in_one_go(parts, of):
    targets = [np.empty_like(part) for part in parts]
    for found, alone in zip(chunk_sums(parts, targets, of=of), chunk_sums(parts), strict=True):
        np.testing.assert_array_equal(found, alone)
    for target, part in zip(targets, parts, strict=True):
        np.testing.assert_array_equal(target, part)


def test_chunks_that_changed_places_are_noticed(parts):
    """Words are only added up within a chunk, so places count by chunk, and by tensor."""
    whole = np.concatenate(parts)[: 3 * CHUNK_BYTES]
    swapped = np.roll(whole, CHUNK_BYTES)
    slots = lay_out([TensorBlob(name="w", dtype="U8", shape=whole.shape, data=whole)])[0]
    assert digest(1, slots, [whole]) != digest(1, slots, [swapped])
    assert sorted(chunk_sums([whole])[0]) == sorted(chunk_sums([swapped])[0])
