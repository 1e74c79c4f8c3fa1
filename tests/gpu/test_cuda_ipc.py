"""Weights between two processes on one GPU, without leaving it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

from headrace.errors import WeightSyncError
from headrace.models.loading import make_tiny_model
from headrace.models.tensors import load_blobs, named_tensors, to_blobs
from headrace.weights.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from headrace.weights.gpu_segments import grow_segments

pytestmark = pytest.mark.gpu

_READER = """
import json, sys
from headrace.types import TensorSlot, WeightManifest
from headrace.weights.cuda_ipc import CudaIpcReceiver
told = json.loads(sys.stdin.read())
slots = tuple(TensorSlot(**{**s, "shape": tuple(s["shape"])}) for s in told.pop("slots"))
manifest = WeightManifest(**told, slots=slots)
receiver = CudaIpcReceiver()
sums = {b.name: int(b.data.long().sum()) for b in receiver.receive(manifest)}
receiver.close()
print(json.dumps(sums))
"""


@pytest.fixture
def model(tmp_path):
    return make_tiny_model(tmp_path, vocab_size=61).to(torch.bfloat16).cuda()


@pytest.fixture(params=[False, True], ids=["fixed", "growing"])
def sender(request):
    """In a process that takes its memory in fixed pieces, or in segments that grow."""
    grow_segments(request.param)
    yield CudaIpcSender(growing_segments=request.param)
    grow_segments(False)


def test_another_process_reads_the_same_bytes(model, sender):
    manifest = sender.send(3, to_blobs(model))
    told = json.dumps(asdict(manifest))
    done = subprocess.run(
        [sys.executable, "-c", _READER], input=told, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    expected = {
        name: int(tensor.detach().reshape(-1).view(torch.uint8).long().sum())
        for name, tensor in named_tensors(model).items()
    }
    assert json.loads(done.stdout) == expected


def test_weights_reach_a_model_of_the_same_process(model, tmp_path):
    other = make_tiny_model(tmp_path / "other", vocab_size=61, seed=1).to(torch.bfloat16).cuda()
    sender = CudaIpcSender()
    manifest = sender.send(0, to_blobs(model))
    load_blobs(other, CudaIpcReceiver().receive(manifest))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_memory_that_was_written_over_is_refused(model):
    sender = CudaIpcSender()
    manifest = sender.send(0, to_blobs(model))
    sender.retire(0)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    sender.send(1, to_blobs(model))
    with pytest.raises(WeightSyncError, match="digest"):
        CudaIpcReceiver().receive(manifest)


def test_memory_that_is_gone_is_refused(model):
    sender = CudaIpcSender()
    manifest = sender.send(0, to_blobs(model))
    told = json.loads(manifest.location)
    nowhere = replace(manifest, location=json.dumps({**told, "storage": [{"hex": "00"}]}))
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        CudaIpcReceiver().receive(nowhere)
