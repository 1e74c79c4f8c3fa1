"""What the first of several ranks holds of the model while it publishes: the tensors at hand, and beside them what the
transport keeps by its nature."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from headrace.models.loading import make_tiny_model
from headrace.models.tensors import tensor_bytes
from headrace.trainers.ranks import Ranks
from headrace.trainers.sharded_weights import ShardedWeights
from headrace.types import TensorBlob
from headrace.weights import bundle_sender, collective, cuda_ipc, files, shared_memory
from headrace.weights.bundle import aligned
from headrace.weights.transports import Route, weight_sender

BUCKET_BYTES = 40_000
CELLS = [
    *((bundle, way) for bundle in ("full", "delta") for way in ("shared_memory", "files", "collective")),
    ("full", "cuda_ipc"),
]


class Counter:
    """Counts the bytes of tensors that somebody still holds."""

    def __init__(self) -> None:
        self.num_bytes = self.most = self.all = self.largest = 0

    def counted(self, blobs: Iterable[TensorBlob], *, on_device: bool) -> Iterator[TensorBlob]:
        for blob in blobs:
            data = torch.from_numpy(blob.data) if on_device else blob.data
            self.num_bytes += data.nbytes
            self.all += data.nbytes
            self.largest = max(self.largest, data.nbytes)
            self.most = max(self.most, self.num_bytes)
            weakref.finalize(data, self._gone, data.nbytes)
            made = TensorBlob(name=blob.name, dtype=blob.dtype, shape=blob.shape, data=data)
            del blob, data
            yield made
            del made

    def _gone(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class Buffer:
    """Stands for GPU memory that others can open."""

    def __init__(self, num_bytes, device, *, growing_segments):
        self.bytes, self.location = torch.zeros(num_bytes, dtype=torch.uint8), ""


@pytest.fixture
def weights(tmp_path: Path, ranks: Ranks) -> tuple[ShardedWeights, int]:
    """One rank's, who gathers from itself, so that every tensor is made for the bundle; and the bundle's length."""
    model = make_tiny_model(tmp_path / "model", vocab_size=200, hidden_size=48, num_layers=6)
    num_bytes = sum(map(aligned, tensor_bytes(model, "bfloat16")))
    return ShardedWeights(model.float(), torch.bfloat16, ranks=ranks), num_bytes


@pytest.mark.parametrize(("bundle", "transport"), CELLS)
def test_the_model_is_never_held_as_a_whole(weights, tmp_path, monkeypatch, bundle, transport):
    for module in (bundle_sender, collective, cuda_ipc, files, shared_memory):
        monkeypatch.setattr(module, "_BUCKET_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(cuda_ipc, "_Buffer", Buffer)
    monkeypatch.setattr(cuda_ipc, "_device_of", lambda tensors: torch.device("cpu"))
    route = Route(transport=transport, why="", bundle=bundle)
    weights, num_bytes = weights
    sender = weight_sender(
        route, segments=tmp_path / "segments", folder=tmp_path / "folder", full_bytes=num_bytes
    )
    on_device = transport == "cuda_ipc"
    for version, kind in enumerate((None, None, "full")):
        counter = Counter()
        manifest = sender.send(version, counter.counted(weights.blobs(), on_device=on_device), kind=kind)
        assert manifest.kind == (bundle if version == 1 else "full")
        assert manifest.num_bytes == num_bytes or manifest.kind == "delta"
        assert counter.all > 4 * BUCKET_BYTES
        # A bucket, and the tensor that no longer fitted into it.
        assert counter.most <= BUCKET_BYTES + counter.largest
        assert counter.num_bytes == 0
        # Many tensors change so much that a delta has them whole.
        with torch.no_grad():
            for name in weights.names():
                if ".mlp." in name:
                    weights.local(name).normal_()
        sender.retire(version)
    sender.close()
