"""Gated layers in one product: their values and gradients, and which layers are computed so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headrace.models.float_residual import keep_float_residual
from headrace.models.gated_layer import fuse_gated_layers
from headrace.models.joined_linear import JoinedLinear, join_linears
from headrace.models.loading import load_model, make_tiny_model

Function = Callable[[torch.Tensor], torch.Tensor]


def tiny(directory: Path, family: str = "qwen2"):
    make_tiny_model(
        directory, family=family, vocab_size=97, hidden_size=64, num_layers=6, context_tokens=128, init_std=0.06
    )  # fmt: skip
    model = load_model(directory).bfloat16()
    assert keep_float_residual(model)
    return model


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_model_is_nearer_to_float32(tmp_path, family, joined):
    model, ids = tiny(tmp_path, family), torch.arange(90)[None] % 97
    exact = logits(copy.deepcopy(model).float(), ids)
    if joined:
        join_linears(model)
    before = (logits(model, ids) - exact).abs().mean()
    assert fuse_gated_layers(model) == 6 and fuse_gated_layers(model) == 0
    after = (logits(model, ids) - exact).abs().mean()
    assert after < 0.95 * before
    assert all(type(layer.mlp.gate_proj) is JoinedLinear for layer in model.model.layers)


def test_nothing_is_rounded_between_the_products(tmp_path):
    """What a layer adds differs from float32 arithmetic by the rounding of its last product's operand alone."""
    layer = tiny(tmp_path).model.layers[0].mlp
    x = torch.randn(50, 64).bfloat16()
    gate, up = (F.linear(x.float(), part.weight.float()) for part in (layer.gate_proj, layer.up_proj))
    wanted = F.linear((F.silu(gate) * up).bfloat16().float(), layer.down_proj.weight.float())
    assert fuse_gated_layers(_owner(layer)) == 1
    with torch.no_grad():
        torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer(x).detach(), wanted, rtol=1e-5, atol=1e-6)


def _owner(layer: nn.Module):
    """A model that is nothing but this layer, to the function that looks for layers."""

    class Owner(nn.Module):
        dtype = torch.bfloat16

        def get_decoder(self):
            return self

        def __init__(self) -> None:
            super().__init__()
            self.layers, self.norm = nn.ModuleList([layer]), _widened_norm()

    return Owner()


def _widened_norm() -> nn.Module:
    norm = nn.RMSNorm(4)
    norm.forward = lambda hidden: hidden  # type: ignore[method-assign]
    return norm


def recomputed(function: Function) -> Function:
    return lambda x: checkpoint(function, x, use_reentrant=False)


def compiled(function: Function) -> Function:
    """With the compiler's own division into forward and backward."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=True, fullgraph=True, backend="aot_eager_decomp_partition")


@pytest.mark.parametrize("run", [lambda f: f, recomputed, compiled], ids=["eager", "recomputed", "compiled"])
@pytest.mark.parametrize("frozen", [(), ("up_proj",), ("down_proj",), ("gate_proj", "up_proj", "down_proj")])
def test_gradients_are_those_of_the_layers_apart(tmp_path, run, frozen):
    layer = tiny(tmp_path).model.layers[0].mlp
    apart = copy.deepcopy(layer).float()
    assert fuse_gated_layers(_owner(layer)) == 1
    for name in ("gate_proj", "up_proj", "down_proj"):
        for one in (layer, apart):
            getattr(one, name).weight.requires_grad_(name not in frozen)
    function = run(layer.forward)
    for num_rows in (5, 9):
        x = torch.randn(2, num_rows, 64).bfloat16()
        pull = torch.randn(2, num_rows, 64)
        found, wanted = (
            gradients(*case, pull) for case in ((layer, function, x), (apart, apart.forward, x.float()))
        )
        for name, right in wanted.items():
            if right is None:
                assert found[name] is None
            else:
                assert found[name].dtype == (torch.float32 if name == "out" else torch.bfloat16)
                assert (found[name].float() - right).norm() < 0.01 * right.norm(), name


def gradients(
    layer: nn.Module, function: Function, x: torch.Tensor, pull: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    x = x.detach().requires_grad_()
    layer.zero_grad()
    out = function(x)
    (out.float() * pull).sum().backward()
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def test_other_layers_are_left_alone(tmp_path):
    model = tiny(tmp_path)
    layers = [layer.mlp for layer in model.model.layers]
    layers[0].gate_proj.bias = nn.Parameter(torch.zeros(layers[0].gate_proj.out_features).bfloat16())
    layers[1].act_fn = nn.GELU()
    layers[2].more = nn.Identity()
    real = type(layers[3]).forward
    layers[3].forward = lambda x: 2 * real(layers[3], x)
    assert fuse_gated_layers(model) == 2
    assert [type(layer.gate_proj) is JoinedLinear for layer in layers] == [False] * 4 + [True] * 2


def test_a_layer_whose_forward_scales_is_left_alone(tmp_path, monkeypatch):
    model = tiny(tmp_path)
    kind = type(model.model.layers[0].mlp)
    real = kind.forward
    monkeypatch.setattr(kind, "forward", lambda layer, x: 1.1 * real(layer, x))
    assert fuse_gated_layers(model) == 0


def test_models_in_float32_and_gelu_ones_are_left_alone(tmp_path):
    assert fuse_gated_layers(tiny(tmp_path / "a").float()) == 0
    assert fuse_gated_layers(tiny(tmp_path / "b", "gemma2")) == 0
