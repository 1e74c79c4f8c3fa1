from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from headrace import wire
from headrace.errors import WeightSyncError
from headrace.types import TensorBlob, TensorSlot
from headrace.weights import shared_memory
from headrace.weights.shared_memory import HEADER_BYTES, SharedMemoryReceiver, SharedMemorySender


def blobs(seed: int, sizes: tuple[int, ...] = (12, 300, 0, 4096)) -> list[TensorBlob]:
    rng = np.random.default_rng(seed)
    return [
        TensorBlob(
            name=f"layer.{i}", dtype="F32", shape=(n // 4,), data=rng.integers(0, 256, n, dtype=np.uint8)
        )
        for i, n in enumerate(sizes)
    ]


def as_bytes(tensors) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {t.name: (t.dtype, t.shape, t.data.tobytes()) for t in tensors}


@pytest.fixture
def sender(tmp_path: Path):
    sender = SharedMemorySender(tmp_path / "weights")
    yield sender
    sender.close()


def test_tensors_arrive_as_sent(sender):
    manifest = wire.decode(wire.encode(sender.send(3, blobs(0))))
    assert (manifest.version, manifest.kind, manifest.base_version) == (3, "full", None)
    assert all(slot.offset % 64 == 0 for slot in manifest.slots)
    assert as_bytes(SharedMemoryReceiver().receive(manifest)) == as_bytes(blobs(0))


def test_generated_blobs_and_bundles_larger_than_a_chunk(sender):
    tensors = blobs(1, sizes=(3 << 20, 5, 1 << 20))
    manifest = sender.send(1, (t for t in tensors))
    assert as_bytes(SharedMemoryReceiver().receive(manifest)) == as_bytes(tensors)


def test_tensors_made_for_the_bundle_are_held_a_bucket_at_a_time(sender, monkeypatch):
    monkeypatch.setattr(shared_memory, "_BUCKET_BYTES", 2500)
    alive: list[weakref.ref[np.ndarray]] = []
    most = 0

    def gathered(seed: int):
        nonlocal most
        for blob in blobs(seed, sizes=(1000,) * 8):
            made = dataclasses.replace(blob, data=blob.data.copy())
            alive.append(weakref.ref(made.data))
            most = max(most, sum(one() is not None for one in alive))
            yield made
            del made

    first = sender.send(1, gathered(1))
    assert most == 3, "a bucket, and the tensor that did not fit into it"
    second = sender.send(2, gathered(2))
    for manifest, seed in ((first, 1), (second, 2)):
        assert as_bytes(SharedMemoryReceiver().receive(manifest)) == as_bytes(blobs(seed, sizes=(1000,) * 8))


def test_a_bundle_that_breaks_off_leaves_nothing_behind_and_the_last_one_readable(sender, tmp_path):
    kept = sender.send(1, blobs(1))

    def broken():
        yield from blobs(2)
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        sender.send(2, broken())
    assert [str(path) for path in (tmp_path / "weights").iterdir()] == [kept.location]
    assert as_bytes(SharedMemoryReceiver().receive(kept)) == as_bytes(blobs(1))
    assert as_bytes(SharedMemoryReceiver().receive(sender.send(2, blobs(2)))) == as_bytes(blobs(2))


def test_an_empty_bundle_travels(sender):
    assert list(SharedMemoryReceiver().receive(sender.send(1, []))) == []


def test_versions_live_until_retired_and_segments_are_used_again(sender):
    receiver = SharedMemoryReceiver()
    first, second = sender.send(1, blobs(1)), sender.send(2, blobs(2))
    assert as_bytes(receiver.receive(first)) == as_bytes(blobs(1))
    sender.retire(1)
    third = sender.send(3, blobs(3))
    assert third.location == first.location != second.location
    assert as_bytes(receiver.receive(second)) == as_bytes(blobs(2))
    assert as_bytes(receiver.receive(third)) == as_bytes(blobs(3))


def test_equal_weights_have_equal_digests_whatever_the_segment_held(sender, tmp_path):
    sender.send(1, blobs(1, sizes=(5000, 5000)))
    sender.retire(1)
    fresh = SharedMemorySender(tmp_path / "fresh")
    assert sender.send(2, blobs(9)).digest == fresh.send(2, blobs(9)).digest
    assert sender.send(4, blobs(9)).digest != sender.send(2, blobs(9)).digest
    fresh.close()


def test_a_version_sent_again_leaves_the_first_to_its_readers(sender):
    first = sender.send(1, blobs(1))
    second = sender.send(1, blobs(2))
    for manifest, seed in ((first, 1), (second, 2)):
        assert as_bytes(SharedMemoryReceiver().receive(manifest)) == as_bytes(blobs(seed))
    sender.retire(1)
    for manifest in (first, second):
        with pytest.raises(WeightSyncError, match="was retired"):
            SharedMemoryReceiver().receive(manifest)


def test_small_free_segments_give_way_to_a_larger_one(sender, tmp_path):
    small = sender.send(1, blobs(1))
    sender.retire(1)
    sender.retire(1)
    sender.send(2, blobs(2, sizes=(100_000,)))
    assert not Path(small.location).exists()
    assert len(list((tmp_path / "weights").iterdir())) == 1


def test_retired_version_is_refused(sender):
    manifest = sender.send(1, blobs(1))
    sender.retire(1)
    with pytest.raises(WeightSyncError, match=r"version 1 .* was retired"):
        SharedMemoryReceiver().receive(manifest)


def test_reused_segment_is_refused_by_its_version(sender):
    manifest = sender.send(1, blobs(1))
    sender.retire(1)
    sender.send(2, blobs(2))
    with pytest.raises(WeightSyncError, match=r"version 1 .* holds version 2: it was retired and used again"):
        SharedMemoryReceiver().receive(manifest)


def test_torn_payload_is_refused(sender):
    manifest = sender.send(1, blobs(1))
    with open(manifest.location, "r+b") as file:
        file.seek(HEADER_BYTES + manifest.slots[1].offset + 7)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(WeightSyncError, match=r"version 1 .* digest: the bytes are torn or overwritten"):
        SharedMemoryReceiver().receive(manifest)


def test_unfinished_segment_is_refused(sender):
    """What a sender killed while copying leaves behind: its header still says that it is writing."""
    manifest = sender.send(1, blobs(1))
    with open(manifest.location, "r+b") as file:
        file.seek(8)
        file.write(struct.pack("<q", 1))
    with pytest.raises(WeightSyncError, match=r"version 1 .* was never finished"):
        SharedMemoryReceiver().receive(manifest)


def test_truncated_segment_is_refused_without_a_bus_error(sender):
    manifest = sender.send(1, blobs(1))
    os.truncate(manifest.location, HEADER_BYTES + 100)
    with pytest.raises(WeightSyncError, match=f"truncated to {HEADER_BYTES + 100} of"):
        SharedMemoryReceiver().receive(manifest)


def test_missing_file_is_refused(sender):
    manifest = sender.send(1, blobs(1))
    sender.close()
    with pytest.raises(WeightSyncError, match=r"version 1 is not at .* removed"):
        SharedMemoryReceiver().receive(manifest)


def test_foreign_file_is_refused(sender):
    manifest = sender.send(1, blobs(1))
    Path(manifest.location).write_bytes(bytes(1 << 16))
    with pytest.raises(WeightSyncError, match="not a Headrace segment"):
        SharedMemoryReceiver().receive(manifest)


def test_manifest_of_another_bundle_is_refused(sender):
    manifest = sender.send(1, blobs(1))
    with pytest.raises(WeightSyncError, match="another bundle"):
        SharedMemoryReceiver().receive(dataclasses.replace(manifest, digest="0" * 32))


def test_altered_slot_table_is_refused(sender):
    manifest = sender.send(1, blobs(1))
    renamed = (dataclasses.replace(manifest.slots[0], name="other"), *manifest.slots[1:])
    with pytest.raises(WeightSyncError, match="does not match its digest"):
        SharedMemoryReceiver().receive(dataclasses.replace(manifest, slots=renamed))
    outside = (TensorSlot(name="far", dtype="U8", shape=(8,), offset=manifest.num_bytes, num_bytes=8),)
    with pytest.raises(WeightSyncError, match="'far' lies outside"):
        SharedMemoryReceiver().receive(dataclasses.replace(manifest, slots=outside))


def test_tensor_named_twice_is_refused(sender):
    twice = blobs(1)[:1] * 2
    with pytest.raises(WeightSyncError, match=r"'layer\.0' is in the bundle twice"):
        sender.send(1, twice)


def test_no_room_is_an_error_that_leaves_nothing_behind(sender, tmp_path):
    huge = np.broadcast_to(np.uint8(0), (1 << 50,))
    blob = TensorBlob(name="huge", dtype="U8", shape=huge.shape, data=huge)
    with pytest.raises(WeightSyncError, match=r"cannot map .* make room"):
        sender.send(1, [blob])
    assert list((tmp_path / "weights").iterdir()) == []


def test_tensors_in_hand_are_not_overwritten_by_the_next_bundle(sender):
    receiver = SharedMemoryReceiver()
    kept = list(receiver.receive(sender.send(1, blobs(1))))
    list(receiver.receive(sender.send(2, blobs(2))))
    assert as_bytes(kept) == as_bytes(blobs(1))


def test_private_memory_is_used_again_when_no_tensor_is_alive(sender):
    receiver = SharedMemoryReceiver()

    def address(version: int) -> int:
        return next(receiver.receive(sender.send(version, blobs(version)))).data.ctypes.data

    assert address(1) == address(2)


def test_readers_exit_does_not_remove_the_segment(sender, tmp_path):
    manifest = sender.send(1, blobs(1))
    (tmp_path / "manifest").write_bytes(wire.encode(manifest))
    program = (
        "import sys, pathlib\n"
        "from headrace import wire\n"
        "from headrace.weights.shared_memory import SharedMemoryReceiver\n"
        "manifest = wire.decode(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "print(sum(int(blob.data.sum()) for blob in SharedMemoryReceiver().receive(manifest)))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "manifest")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    reader = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert int(reader.stdout) == sum(int(blob.data.sum()) for blob in blobs(1))
    assert as_bytes(SharedMemoryReceiver().receive(manifest)) == as_bytes(blobs(1))
