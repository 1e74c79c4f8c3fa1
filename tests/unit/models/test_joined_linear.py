"""Joined layers compute what the layers did, keep their names, and follow weights loaded in place."""

from __future__ import annotations

import copy

import pytest
import torch

from headrace.errors import InvariantError
from headrace.models.joined_linear import QUERY_KEY_VALUE, JoinedLinear, join_linears
from headrace.models.loading import make_tiny_model
from headrace.models.tensors import load_blobs, named_tensors, to_blobs


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_logits_names_and_loading_are_as_before(tmp_path, family):
    model = make_tiny_model(tmp_path / "a", family=family, vocab_size=61, num_kv_heads=2, init_std=0.1)
    other = make_tiny_model(
        tmp_path / "b", family=family, vocab_size=61, num_kv_heads=2, init_std=0.1, seed=1
    )
    joined = copy.deepcopy(model)
    assert join_linears(joined) == 3 * model.config.num_hidden_layers
    assert named_tensors(joined).keys() == named_tensors(model).keys()
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(joined(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
        load_blobs(joined, to_blobs(other))
        torch.testing.assert_close(joined(ids).logits, other(ids).logits, atol=1e-5, rtol=1e-5)


def test_nothing_is_joined_twice(tmp_path):
    model = make_tiny_model(tmp_path, vocab_size=61)
    assert join_linears(model) > 0
    assert join_linears(model) == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_gradients_land_on_the_parameters_there_were(tmp_path, family):
    model = make_tiny_model(tmp_path, family=family, vocab_size=61, num_kv_heads=2, init_std=0.1)
    joined = copy.deepcopy(model)
    parameters = dict(joined.named_parameters())
    assert join_linears(joined, (QUERY_KEY_VALUE,)) == 2 * model.config.num_hidden_layers
    names = {name.split(".")[-1] for name, m in joined.named_modules() if isinstance(m, JoinedLinear)}
    assert names == set(QUERY_KEY_VALUE)
    assert all(parameters[name] is parameter for name, parameter in joined.named_parameters())
    ids = torch.arange(20).unsqueeze(0)
    for one in (model, joined):
        one(ids).logits.log_softmax(-1)[..., 5].sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameters[name].grad, parameter.grad, atol=1e-5, rtol=1e-5)


def test_layers_that_are_not_alike_stay_apart(tmp_path):
    model = make_tiny_model(tmp_path, family="llama", vocab_size=61)
    for layer in model.model.layers:
        layer.self_attn.v_proj.bias = torch.nn.Parameter(torch.zeros(layer.self_attn.v_proj.out_features))
    assert join_linears(model, (QUERY_KEY_VALUE,)) == 0


def test_a_copy_of_joined_layers_is_not_trained(tmp_path):
    model = make_tiny_model(tmp_path, vocab_size=61)
    join_linears(model, (QUERY_KEY_VALUE,))
    with pytest.raises(InvariantError, match="first, then join"):
        copy.deepcopy(model)(torch.arange(20).unsqueeze(0))


def test_biases_are_trained_also_where_weights_are_not(tmp_path):
    model = make_tiny_model(tmp_path, family="qwen2", vocab_size=61)
    join_linears(model, (QUERY_KEY_VALUE,))
    model.requires_grad_(False)
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("v_proj.bias")]
    for bias in biases:
        bias.requires_grad_(True)
    model(torch.arange(20).unsqueeze(0)).logits.log_softmax(-1)[..., 5].sum().backward()
    assert biases and all(bias.grad is not None and bias.grad.any() for bias in biases)
