"""Layers whose products a kernel computes for few rows: what they compute without it, and what a compiler sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.engines import device_model
from headrace.models.float_residual import keep_float_residual, widened_linears
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.skinny_linear import use_skinny_products


def tiny(directory: Path, family: str = "qwen2"):
    make_tiny_model(
        directory, family=family, vocab_size=97, hidden_size=64, num_layers=3, context_tokens=128, init_std=0.06
    )  # fmt: skip
    return load_model(directory)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


@pytest.mark.parametrize(("family", "in_a_layer"), [("llama", 2), ("qwen2", 2), ("qwen3_moe", 1)])
def test_without_a_gpu_nothing_else_is_computed(tmp_path, family, in_a_layer):
    model, ids = tiny(tmp_path, family).bfloat16(), torch.arange(40)[None] % 97
    keep_float_residual(model)
    before = logits(model, ids)
    assert use_skinny_products(model) == 3 * in_a_layer
    assert not widened_linears(model) and use_skinny_products(model) == 0
    assert torch.equal(logits(model, ids), before)


def test_models_without_float32_sums_of_narrow_products_stay_as_they_are(tmp_path):
    model = tiny(tmp_path)
    assert use_skinny_products(model.bfloat16()) == 0
    keep_float_residual(model.float())
    assert use_skinny_products(model) == 0


def test_a_bias_is_added(tmp_path):
    model = tiny(tmp_path).bfloat16()
    keep_float_residual(model)
    linear = model.model.layers[0].mlp.down_proj
    linear.bias = torch.nn.Parameter(torch.linspace(-1, 1, linear.out_features).bfloat16())
    x = torch.randn((1, 5, linear.in_features), generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = linear(x)
    use_skinny_products(model)
    assert torch.equal(linear(x), expected)


def test_layers_stay_one_compiled_piece_of_code(tmp_path, monkeypatch):
    """The operation neither breaks the graph nor depends on the number of rows."""
    from torch._dynamo.testing import CompileCounter

    monkeypatch.setattr(device_model, "_SKINNY_PRODUCTS", True)
    torch._dynamo.reset()
    plain = tiny(tmp_path).bfloat16()
    keep_float_residual(plain)
    model = device_model.DeviceModel(plain, compiled=False)
    assert not widened_linears(plain)
    counter = CompileCounter()
    for layer in plain.base_model.layers:
        layer.forward = torch.compile(layer.forward, backend=counter, dynamic=True, fullgraph=True)
    for num_rows in (9, 5, 33, 120):
        ids = torch.arange(num_rows) % 97
        model.logits(ids, ids, device_model._Probe(len(model.layers)))
    assert counter.frame_count == 1


def test_the_shape_only_twin_agrees_with_the_operation():
    x, weight = torch.randn(3, 16).bfloat16(), torch.randn(24, 16).bfloat16()
    torch.library.opcheck(torch.ops.headrace.skinny_product.default, (x, weight))
