"""The running sum in float32: closer to float32 arithmetic in bfloat16, and nothing changed in float32."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from headrace.models.float_residual import keep_float_residual
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.wide_product import wide_product

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "qwen3_moe", "olmoe"]


def tiny(directory: Path, family: str):
    make_tiny_model(
        directory, family=family, vocab_size=97, hidden_size=64, num_layers=6, context_tokens=128, init_std=0.06
    )  # fmt: skip
    return load_model(directory)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_models_compute_what_they_did(tmp_path, family):
    model, ids = tiny(tmp_path, family), torch.arange(40)[None] % 97
    before = logits(model, ids)
    assert keep_float_residual(model) and keep_float_residual(model)
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_nearer_to_float32(tmp_path, family):
    model, ids = tiny(tmp_path, family).bfloat16(), torch.arange(90)[None] % 97
    exact = logits(copy.deepcopy(model).float(), ids)
    before = (logits(model, ids) - exact).abs().mean()
    keep_float_residual(model)
    after = (logits(model, ids) - exact).abs().mean()
    assert after < 0.9 * before


def test_the_sum_is_float32_and_products_are_not(tmp_path):
    model = copy.deepcopy(tiny(tmp_path, "qwen2").bfloat16())
    keep_float_residual(model)
    model = copy.deepcopy(model)
    met: dict[str, set[torch.dtype]] = {"layer": set(), "linear": set()}
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, made: met["layer"].add(made.dtype))
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda _, given: met["linear"].add(given[0].dtype))
    logits(model, torch.arange(10)[None])
    assert met == {"layer": {torch.float32}, "linear": {torch.bfloat16}}


@pytest.mark.parametrize("bias", [False, True])
def test_a_wide_product_is_not_rounded_and_its_gradients_are_those_of_a_narrow_one(bias):
    torch.manual_seed(0)
    x, weight = (
        torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((2, 5, 24), (7, 24))
    )
    b = torch.randn(7, dtype=torch.bfloat16, requires_grad=True) if bias else None
    inputs = [t for t in (x, weight, b) if t is not None]
    wide, narrow = wide_product(x, weight, b), nn.functional.linear(x, weight, b)
    exact = nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-5)
    pulled = torch.randn(wide.shape).bfloat16()
    found = torch.autograd.grad(wide, inputs, pulled.float())
    wanted = torch.autograd.grad(narrow, inputs, pulled)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.02)


def test_what_is_added_to_the_sum_is_not_rounded_before(tmp_path):
    model = tiny(tmp_path, "qwen2").bfloat16()
    keep_float_residual(model)
    met = {}
    for name, module in copy.deepcopy(model).model.layers[0].named_modules():
        if isinstance(module, nn.Linear):
            met[name.split(".")[-1]] = module(torch.ones((1, module.in_features), dtype=torch.bfloat16)).dtype
    wide = {name for name, dtype in met.items() if dtype == torch.float32}
    assert wide == {"o_proj", "down_proj"}


def test_layers_whose_norms_are_unknown_are_left_alone(tmp_path):
    """They may hand products what they do not expect."""
    model = tiny(tmp_path, "qwen2").bfloat16()
    layer = model.model.layers[3]
    layer.post_attention_layernorm = nn.Sequential(
        layer.post_attention_layernorm, nn.Linear(64, 64).bfloat16()
    )
    before = logits(model, torch.arange(10)[None])
    assert not keep_float_residual(model)
    assert torch.equal(logits(model, torch.arange(10)[None]), before)


def test_layers_that_read_the_sum_itself_are_left_alone():
    from transformers import Olmo2Config, Olmo2ForCausalLM

    config = Olmo2Config(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = Olmo2ForCausalLM(config).bfloat16()
    assert not keep_float_residual(model)
    logits(model, torch.arange(10)[None])
