"""Weights that stay on a GPU, as far as no GPU is needed: which memory is used again when, and what is refused
before any address is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from headrace.errors import WeightSyncError
from headrace.types import TensorBlob, TensorSlot, WeightManifest
from headrace.weights import cuda_ipc
from headrace.weights.gpu_bundle import Checksums


@dataclass
class Memory:
    """Stands for a sender's buffer of this process."""

    bytes: torch.Tensor


def manifest(num_bytes, offset=0):
    slot = TensorSlot(name="w", dtype="U8", shape=(64,), offset=offset, num_bytes=64)
    return WeightManifest(
        version=3,
        base_version=None,
        kind="full",
        transport=cuda_ipc.TRANSPORT,
        location=json.dumps({"pid": 0, "storage": []}),
        num_bytes=num_bytes,
        digest="",
        slots=(slot,),
    )


def test_a_bundle_longer_than_the_memory_it_names_is_refused(monkeypatch):
    told = manifest(2048, offset=1984)
    memory = Memory(torch.zeros(1024, dtype=torch.uint8))
    monkeypatch.setitem(cuda_ipc._own_buffers, told.location, memory)
    with pytest.raises(WeightSyncError, match="2048 bytes, but the trainer's GPU memory there has 1024"):
        cuda_ipc.CudaIpcReceiver().receive(told)


@pytest.mark.parametrize("places", [["cuda:0", "host"], ["cuda:0", "cuda:1"], ["cpu"], ["host"]])
def test_weights_that_are_not_all_on_one_gpu_are_refused(places):
    def blob(number, place):
        data = np.zeros(16, np.uint8)
        if place != "host":
            data = OnDevice(torch.from_numpy(data), torch.device(place))
        return TensorBlob(name=str(number), dtype="U8", shape=(16,), data=data)

    with pytest.raises(WeightSyncError, match=r"not on one GPU, all of them; set weights\.transport"):
        cuda_ipc.CudaIpcSender().send(0, [blob(i, place) for i, place in enumerate(places)])


def test_memory_is_written_over_only_after_its_version_is_retired(monkeypatch):
    """An engine that catches up may still read what was sent, while the trainer sends the same version to all."""
    monkeypatch.setattr(Buffer, "made", 0)
    monkeypatch.setattr(cuda_ipc, "_Buffer", Buffer)
    monkeypatch.setattr(cuda_ipc, "_device_of", lambda tensors: torch.device("cpu"))
    sender = cuda_ipc.CudaIpcSender()
    blob = TensorBlob(name="w", dtype="U8", shape=(16,), data=torch.zeros(16, dtype=torch.uint8))

    def place_of(version):
        return sender.send(version, [blob]).location

    assert [place_of(version) for version in (1, 2, 2, 3)] == ["0", "1", "2", "3"]
    sender.retire(2)
    assert {place_of(4), place_of(5)} == {"1", "2"} and place_of(6) == "4"


class Buffer(Memory):
    """One that no other process could open."""

    made = 0

    def __init__(self, num_bytes, device, *, growing_segments):
        super().__init__(torch.zeros(num_bytes, dtype=torch.uint8))
        self.location = str(Buffer.made)
        Buffer.made += 1


@pytest.mark.parametrize("room_bytes", [0, 1, 5 << 20])
def test_a_bundle_lies_the_same_whatever_buckets_it_came_in(monkeypatch, room_bytes):
    """Also where the buffer turns out too short on the way; and its digest is what a receiver finds."""
    monkeypatch.setattr(cuda_ipc, "_Buffer", Buffer)
    monkeypatch.setattr(cuda_ipc, "_device_of", lambda tensors: torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    sizes = (1 << 20, 16, 3 << 20, 7, 64, 1000)
    blobs = [
        TensorBlob(
            name=str(i),
            dtype="U8",
            shape=(n,),
            data=torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator),
        )
        for i, n in enumerate(sizes)
    ]

    def bundle(bucket_bytes, version):
        monkeypatch.setattr(cuda_ipc, "_BUCKET_BYTES", bucket_bytes)
        manifest = sender.send(version, iter(blobs))
        (buffer,) = sender._live[version]
        found = Checksums().of(version, manifest.slots, buffer.bytes)
        assert found == manifest.digest
        for slot, blob in zip(manifest.slots, blobs, strict=True):
            assert torch.equal(buffer.bytes[slot.offset : slot.offset + slot.num_bytes], blob.data)
        return manifest.slots, manifest.num_bytes

    sender = cuda_ipc.CudaIpcSender(room_bytes=room_bytes)
    several, again, one = bundle(1 << 16, 0), bundle(1 << 16, 1), bundle(1 << 30, 2)
    assert several == again == one


def test_every_bundle_is_announced_as_it_lies(monkeypatch):
    """Whatever was sent before it, and in whichever memory."""
    monkeypatch.setattr(cuda_ipc, "_Buffer", Buffer)
    monkeypatch.setattr(cuda_ipc, "_device_of", lambda tensors: torch.device("cpu"))
    sender = cuda_ipc.CudaIpcSender()

    def announced(version, *names):
        blobs = [
            TensorBlob(
                name=name, dtype="U8", shape=(48,), data=torch.full((48,), ord(name), dtype=torch.uint8)
            )
            for name in names
        ]
        sent = sender.send(version, blobs)
        memory = sender._live[version][-1].bytes
        assert sent.digest == Checksums().of(version, sent.slots, memory)
        assert [int(memory[slot.offset]) for slot in sent.slots] == [ord(slot.name) for slot in sent.slots]
        sender.retire(version)
        return "".join(slot.name for slot in sent.slots)

    bundles = ["ab", "ba", "abc", "ab", "a", "ab"]
    assert [announced(version, *names) for version, names in enumerate(bundles)] == bundles


def test_a_tensor_that_comes_twice_is_refused_also_in_another_bucket(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "_Buffer", Buffer)
    monkeypatch.setattr(cuda_ipc, "_device_of", lambda tensors: torch.device("cpu"))
    monkeypatch.setattr(cuda_ipc, "_BUCKET_BYTES", 16)
    blob = TensorBlob(name="w", dtype="U8", shape=(16,), data=torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(WeightSyncError, match="in the bundle twice; send shared tensors once"):
        cuda_ipc.CudaIpcSender(room_bytes=32).send(0, [blob, blob])


class Sender:
    """The memory of another process, by its handle, and what that process would announce of it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.memory: dict[str, torch.Tensor] = {}

    def announce(self, version, handle, offsets=(0, 64)):
        memory = self.memory.setdefault(handle, torch.arange(128, dtype=torch.uint8))
        slots = tuple(
            TensorSlot(name=name, dtype="U8", shape=(64,), offset=offset, num_bytes=64)
            for name, offset in zip("ab", offsets, strict=True)
        )
        return replace(
            manifest(128),
            version=version,
            location=json.dumps({"pid": self.pid, "storage": [handle]}),
            digest=Checksums().of(version, slots, memory),
            slots=slots,
        )


@pytest.fixture
def sender(monkeypatch):
    """One whose memory is opened without a GPU."""
    made = Sender(os.getpid())
    monkeypatch.setattr(cuda_ipc, "_open_handle", lambda handle: made.memory[handle[0]].untyped_storage())
    monkeypatch.setattr(torch.cuda, "Stream", lambda place: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return made


def received(receiver, announced):
    return {blob.name: blob.data.tolist() for blob in receiver.receive(announced)}


def test_torn_memory_is_refused_and_read_again_once_it_is_whole(sender):
    receiver, announced = cuda_ipc.CudaIpcReceiver(), sender.announce(1, "x")
    sender.memory["x"][70] ^= 1
    with pytest.raises(
        WeightSyncError, match="version 1 in the trainer's GPU memory does not match its digest"
    ):
        receiver.receive(announced)
    sender.memory["x"][70] ^= 1
    assert received(receiver, announced) == {"a": list(range(64)), "b": list(range(64, 128))}


def test_tensors_may_lie_elsewhere_in_memory_that_is_used_again(sender):
    receiver = cuda_ipc.CudaIpcReceiver()
    received(receiver, sender.announce(1, "x"))
    swapped = received(receiver, sender.announce(2, "x", offsets=(64, 0)))
    assert swapped == {"a": list(range(64, 128)), "b": list(range(64))}


def test_slots_that_are_not_aligned_are_refused(sender):
    with pytest.raises(WeightSyncError, match="slots of version 1 are not aligned"):
        cuda_ipc.CudaIpcReceiver().receive(sender.announce(1, "x", offsets=(0, 32)))


def test_memory_of_a_sender_that_died_is_let_go(sender):
    """It would stay on the GPU for as long as an engine has it open."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    receiver = cuda_ipc.CudaIpcReceiver()
    sender.pid = ended.pid
    received(receiver, sender.announce(1, "x"))
    sender.pid = os.getpid()
    live = [sender.announce(version, handle) for version, handle in ((2, "y"), (3, "z"))]
    for announced in live:
        received(receiver, announced)
    assert list(receiver._opened) == list(receiver._seen) == [announced.location for announced in live]


class OnDevice(torch.Tensor):
    """A tensor that is said to lie on a device."""

    def __new__(cls, data, device):
        made = data.as_subclass(cls)
        made.told = device
        return made

    @property
    def device(self):
        return self.told
