"""Gated layers that round neither gate nor up: values, gradients, and which layers compute so."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headrace.errors import InvariantError
from headrace.models import float_residual
from headrace.models.float_residual import keep_float_residual
from headrace.models.gated_layer import has_gated_forward, is_gated, join_gates
from headrace.models.joined_linear import JoinedLinear, join_linears
from headrace.models.loading import load_model, make_tiny_model

Function = Callable[[torch.Tensor], torch.Tensor]


def tiny(directory: Path, family: str = "qwen2"):
    make_tiny_model(
        directory, family=family, vocab_size=97, hidden_size=64, num_layers=6, context_tokens=128, init_std=0.06
    )  # fmt: skip
    return load_model(directory).bfloat16()


def gated(directory: Path, *, joined: bool = False) -> nn.Module:
    """One layer of a model that was prepared."""
    model = tiny(directory)
    assert keep_float_residual(model)
    if joined:
        join_gates(model)
    layer: nn.Module = model.model.layers[0].mlp
    assert (type(layer.gate_proj) is JoinedLinear) == joined
    return layer


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_model_is_nearer_to_float32(tmp_path, family, monkeypatch):
    model, ids = tiny(tmp_path, family), torch.arange(90)[None] % 97
    exact = logits(copy.deepcopy(model).float(), ids)
    rounding = copy.deepcopy(model)
    keep_float_residual(model)
    monkeypatch.setattr(float_residual, "is_gated", lambda _: False)
    keep_float_residual(rounding)
    before, after = ((logits(one, ids) - exact).abs().mean() for one in (rounding, model))
    assert after < 0.95 * before
    join_linears(model)
    assert ((logits(model, ids) - exact).abs().mean()) < 0.95 * before


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
def test_nothing_is_rounded_between_the_products(tmp_path, joined):
    """What a layer adds differs from float32 arithmetic by the rounding of its last product's operand alone."""
    layer, x = gated(tmp_path, joined=joined), torch.randn(50, 64).bfloat16()
    gate, up = (F.linear(x.float(), part.weight.float()) for part in (layer.gate_proj, layer.up_proj))
    wanted = F.linear((F.silu(gate) * up).bfloat16().float(), layer.down_proj.weight.float())
    with torch.no_grad():
        without = layer(x)
    torch.testing.assert_close(without, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(layer(x).detach(), without)


def recomputed(function: Function) -> Function:
    return lambda x: checkpoint(function, x, use_reentrant=False)


def compiled(function: Function) -> Function:
    """With the compiler's own division into forward and backward."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=True, fullgraph=True, backend="aot_eager_decomp_partition")


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("run", [lambda f: f, recomputed, compiled], ids=["eager", "recomputed", "compiled"])
@pytest.mark.parametrize("frozen", [(), ("up_proj",), ("down_proj",), ("gate_proj", "up_proj", "down_proj")])
def test_gradients_are_those_of_float32(tmp_path, run, frozen, joined):
    layer = gated(tmp_path)
    exact = copy.deepcopy(layer).float()
    if joined:
        join_linears(layer)
    for name in ("gate_proj", "up_proj", "down_proj"):
        for one in (layer, exact):
            getattr(one, name).weight.requires_grad_(name not in frozen)
    function = run(layer.forward)
    for num_rows in (5, 9):
        x, pull = torch.randn(2, num_rows, 64).bfloat16(), torch.randn(2, num_rows, 64)
        found, wanted = (
            gradients(*case, pull) for case in ((layer, function, x), (exact, exact.forward, x.float()))
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


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("shape", [(0, 64), (1, 0, 64)])
def test_no_rows_give_no_rows(tmp_path, shape, joined):
    layer, x = gated(tmp_path, joined=joined), torch.zeros(shape).bfloat16()
    assert layer(x).shape == shape
    with torch.no_grad():
        assert layer(x).shape == shape


def test_a_backward_makes_no_gradient_of_the_products(tmp_path):
    from torch.utils._python_dispatch import TorchDispatchMode

    made = []

    class Zeros(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "zeros" in str(func):
                made.append(args)
            return func(*args, **(kwargs or {}))

    out = gated(tmp_path)(torch.randn(5, 64).bfloat16())
    with Zeros():
        out.sum().backward()
    assert not made


@pytest.mark.parametrize("grad", [False, True])
def test_a_copy_of_joined_layers_is_refused(tmp_path, grad):
    layer = copy.deepcopy(gated(tmp_path, joined=True))
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone()
    with torch.set_grad_enabled(grad), pytest.raises(InvariantError, match="no longer share"):
        layer(torch.zeros(2, 64).bfloat16())


def test_what_is_put_beside_a_product_counts(tmp_path):
    layer, x = gated(tmp_path, joined=True), torch.randn(5, 64).bfloat16()

    class Doubling(nn.Module):
        def forward(self, _x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
            return 2 * product

    with torch.no_grad():
        before = layer(x)
        layer.gate_proj.beside = Doubling()
        assert (layer(x) - before).norm() > 0.5 * before.norm()


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_values_do_not_depend_on_whether_gradients_are_wanted(tmp_path, family):
    model, ids = tiny(tmp_path, family), torch.arange(40)[None] % 97
    keep_float_residual(model)
    model.requires_grad_()
    with_gradients = model(input_ids=ids, use_cache=False).logits.float().detach()
    assert torch.equal(with_gradients, logits(model, ids))


class Usual(nn.Module):
    def __init__(self, act_fn: nn.Module | None = None, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(8, 16, bias=bias) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(16, 8, bias=bias), act_fn or nn.SiLU()
        self.limit, self.scale = 7.0, 1.0

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Reversed(Usual):
    def forward(self, hidden):
        return self.down_proj(self.up_proj(hidden) * self.act_fn(self.gate_proj(hidden)))


class Clamped(Usual):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=self.limit)) * self.up_proj(x))


class Scaled(Usual):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.scale


class Swapped(Usual):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class Owning(Usual):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))


class Longer(Usual):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Identity()


class TwoInputs(Usual):
    def forward(self, x, y=0):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Choosy(Usual):
    def forward(self, x):
        if not isinstance(x, torch.Tensor):
            raise ValueError("no tensor")
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OtherSiLU(nn.SiLU):
    pass


def halved(forward):
    @functools.wraps(forward)
    def wrapped(self, x):
        return forward(self, x) * 0.5

    return wrapped


class Wrapped(Usual):
    forward = halved(Usual.forward)


class ByLength(Usual):
    def forward(self, x):
        return super().forward(x * 0.5 if x.shape[1] > 4 else x)


class Turned(Usual):
    def forward(self, x):
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).transpose(0, 1))


def hooked(part: str) -> Usual:
    layer = Usual()
    layer.get_submodule(part).register_forward_hook(lambda *_: None)
    return layer


def replaced(part: str) -> Usual:
    layer = Usual()
    layer.get_submodule(part).forward = lambda x: x
    return layer


@pytest.mark.parametrize("layer", [Usual(), Reversed()], ids=lambda layer: type(layer).__name__)
def test_usual_layers_are_known(layer):
    assert is_gated(layer)


@pytest.mark.parametrize(
    "layer",
    [
        *(
            kind()
            for kind in (
                Clamped,
                Scaled,
                Swapped,
                Owning,
                Longer,
                TwoInputs,
                Choosy,
                Wrapped,
                ByLength,
                Turned,
            )
        ),
        *(Usual(nn.GELU()), Usual(OtherSiLU()), Usual(bias=True)),
        *(hooked("up_proj"), replaced("act_fn"), replaced("down_proj")),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_other_layers_are_left_alone(layer):
    assert not is_gated(layer)


@pytest.mark.parametrize(("family", "count"), [("qwen2", 6), ("gemma2", 0), ("olmoe", 0), ("deepseek_v3", 1)])
def test_families(tmp_path, family, count):
    model = tiny(tmp_path, family)
    keep_float_residual(model)
    assert sum(has_gated_forward(module) for module in model.modules()) == count
