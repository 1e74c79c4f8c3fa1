"""Fused experts under the names of the checkpoint, and back into the same memory."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.models.checkpoint_names import CheckpointNamed, Weights, checkpoint_table, split
from headrace.models.loading import make_tiny_model
from headrace.models.tensors import blobs_of, load_into, named_tensors, to_blobs

MIXTURES = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def build(family: str, seed: int = 0):
    config = AutoConfig.for_model(
        family, vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None, **MIXTURES[family],
    )  # fmt: skip
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", MIXTURES)
def test_bundles_hold_what_a_saved_checkpoint_holds(tmp_path, family):
    model = build(family)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = {blob.name: blob for blob in split(checkpoint_table(model), to_blobs(model))}
    assert sent.keys() == saved.keys()
    for name, tensor in saved.items():
        assert sent[name].shape == tuple(tensor.shape)
        assert sent[name].data.tobytes() == tensor.numpy().tobytes()


@pytest.mark.parametrize("family", MIXTURES)
def test_they_load_into_a_fused_model_in_place(family):
    old, new = build(family), build(family, seed=1)
    weights = Weights(old)
    addresses = {name: tensor.data_ptr() for name, tensor in named_tensors(old).items()}
    updates = list(split(checkpoint_table(new), to_blobs(new)))
    load_into(weights.called(update.name for update in updates), updates)
    assert {name: tensor.data_ptr() for name, tensor in named_tensors(old).items()} == addresses
    for name, tensor in named_tensors(new).items():
        assert torch.equal(named_tensors(old)[name], tensor), name
    found = blobs_of(weights.called(update.name for update in updates))
    assert {b.name: b.data.tobytes() for b in found} == {b.name: b.data.tobytes() for b in updates}


def test_a_dense_model_has_the_same_names_in_both(tmp_path):
    model = make_tiny_model(tmp_path, vocab_size=61)
    assert checkpoint_table(model) == {}
    weights = Weights(model)
    assert weights.called(weights.in_memory) is weights.in_memory


def test_a_conversion_that_computes_keeps_the_name_of_memory(monkeypatch):
    model = build("qwen3_moe")
    monkeypatch.setattr(
        "headrace.models.checkpoint_names.revert_weight_conversion",
        lambda model, state: {f"other.{name}": tensor + 1 for name, tensor in state.items()},
    )
    assert checkpoint_table(model) == {}


class Kept:
    def send(self, version, blobs, *, kind=None):
        self.sent = (version, [blob.name for blob in blobs], kind)

    def retire(self, version):
        self.retired = version

    def close(self):
        self.closed = True


def test_a_sender_can_be_told_to_use_them():
    model, kept = build("qwen3_moe"), Kept()
    sender = CheckpointNamed(kept, model)
    sender.send(3, to_blobs(model), kind="full")
    version, names, kind = kept.sent
    assert (version, kind) == (3, "full") and "model.layers.1.mlp.experts.3.up_proj.weight" in names
    sender.retire(3)
    sender.close()
    assert kept.retired == 3 and kept.closed
