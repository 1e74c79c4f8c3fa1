"""Loading errors that say what to do, and weights that travel as bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from headrace.errors import ModelError, WeightSyncError
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.paged_attention import padded_length
from headrace.models.tensors import load_blobs, named_tensors, to_blobs


def test_saved_model_loads_as_it_was(tmp_path):
    made = make_tiny_model(tmp_path, vocab_size=40, seed=3)
    loaded = load_model(tmp_path)
    assert not loaded.training
    for name, tensor in named_tensors(made).items():
        assert torch.equal(tensor, named_tensors(loaded)[name]), name


def test_equal_seeds_make_equal_models_and_leave_the_generator_alone(tmp_path):
    state = torch.get_rng_state()
    a, b = (make_tiny_model(tmp_path / str(i), vocab_size=40, seed=3) for i in range(2))
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("path", ["/no/such/model", "no-such/model"])
def test_a_missing_model_is_named_with_a_remedy(path):
    with pytest.raises(ModelError, match=f"{path}.*(point at|give)"):
        load_model(path)


def test_an_empty_directory_and_a_wrong_dtype_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="float8"):
        load_model(tmp_path, dtype="float8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blobs_carry_every_tensor_once_and_land_in_place(tmp_path, dtype):
    make_tiny_model(tmp_path / "a", vocab_size=40, seed=1)
    make_tiny_model(tmp_path / "b", vocab_size=40, seed=2)
    source, target = (load_model(tmp_path / name, dtype=dtype) for name in "ab")
    blobs = list(to_blobs(source))
    names = [blob.name for blob in blobs]
    assert ("lm_head.weight" in names) + ("model.embed_tokens.weight" in names) == 1
    assert {blob.dtype for blob in blobs} == {"F32" if dtype == "float32" else "BF16"}
    addresses = {name: tensor.data_ptr() for name, tensor in named_tensors(target).items()}
    for blob in blobs:
        blob.data.flags.writeable = False
    load_blobs(target, blobs)
    for name, tensor in named_tensors(target).items():
        assert torch.equal(tensor, named_tensors(source)[name]) and tensor.data_ptr() == addresses[name]
    assert target.lm_head.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()


def test_blobs_on_a_cpu_are_views(tmp_path):
    model = make_tiny_model(tmp_path, vocab_size=40)
    blob = next(iter(to_blobs(model)))
    tensor = named_tensors(model)[blob.name]
    with torch.no_grad():
        tensor.fill_(1.5)
    assert (blob.data.view(np.float32) == 1.5).all()


@pytest.mark.parametrize("fault", ["missing", "unknown", "twice", "shape", "dtype", "short"])
def test_a_bundle_that_does_not_fit_changes_nothing(tmp_path, fault):
    model = make_tiny_model(tmp_path / "a", vocab_size=40, seed=1)
    blobs = list(to_blobs(make_tiny_model(tmp_path / "b", vocab_size=40, seed=2)))
    last = blobs[-1]
    changed = {
        "missing": blobs[:-1],
        "unknown": [*blobs, dataclasses.replace(last, name="extra")],
        "twice": [*blobs, last],
        "shape": [*blobs[:-1], dataclasses.replace(last, shape=(*last.shape, 1))],
        "dtype": [*blobs[:-1], dataclasses.replace(last, dtype="BF16")],
        "short": [*blobs[:-1], dataclasses.replace(last, data=last.data[:-4])],
    }[fault]
    before = {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}
    with pytest.raises(WeightSyncError):
        load_blobs(model, changed)
    assert all(torch.equal(tensor, before[name]) for name, tensor in named_tensors(model).items())


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_padded_lengths_are_whole_blocks_and_never_too_short(block_size):
    lengths = [padded_length(n, block_size) for n in range(1, 2000)]
    assert all(p >= n and p % block_size == 0 for n, p in enumerate(lengths, start=1))
    assert lengths == sorted(lengths) and len(set(lengths)) < 16
