"""One product for several layers: their values and their gradients, however it is run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headrace.models.joined_product import joined_product

SIZES = [6, 2, 2]
Function = Callable[[torch.Tensor], torch.Tensor]


class Parts:
    """Weights and biases that lie in two larger tensors."""

    def __init__(self, dtype: torch.dtype, *, bias: bool, frozen: tuple[int, ...] = ()) -> None:
        torch.manual_seed(0)
        self.whole_OI = torch.randn(sum(SIZES), 8, dtype=dtype)
        self.whole_O = torch.randn(sum(SIZES), dtype=dtype) if bias else None
        self.weights = [
            nn.Parameter(rows, requires_grad=i not in frozen)
            for i, rows in enumerate(self.whole_OI.split(SIZES))
        ]
        self.biases = [] if self.whole_O is None else [nn.Parameter(b) for b in self.whole_O.split(SIZES)]

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return joined_product(x, self.whole_OI, self.whole_O, self.weights, self.biases)

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        biases = self.biases or [None, None, None]
        pairs = zip(self.weights, biases, strict=True)
        return torch.cat([nn.functional.linear(x, weight, bias) for weight, bias in pairs], dim=-1)

    def gradients(self, function: Function, x: torch.Tensor) -> list[torch.Tensor | None]:
        """Of the input, the weights and the biases, for a loss that pulls each output differently."""
        x = x.detach().requires_grad_()
        product = function(x)
        product.mul(torch.arange(1, product.numel() + 1).view_as(product) % 7 - 3).sum().backward()
        leaves = [x, *self.weights, *self.biases]
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return [product.detach(), *found]


def recomputed(function: Function) -> Function:
    return lambda x: checkpoint(function, x, use_reentrant=False)


def compiled(function: Function) -> Function:
    """With the compiler's own division into forward and backward."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=True, fullgraph=True, backend="aot_eager_decomp_partition")


@pytest.mark.parametrize("run", [lambda f: f, recomputed, compiled], ids=["eager", "recomputed", "compiled"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_values_and_gradients_are_those_of_the_layers(run, bias, dtype, gap):
    parts = Parts(dtype, bias=bias)
    joined = run(parts.joined)
    for num_rows in (5, 9):
        x = torch.randn(2, num_rows, 8).to(dtype)
        found, wanted = parts.gradients(joined, x), parts.gradients(parts.apart, x)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == dtype
            torch.testing.assert_close(one, other, rtol=gap, atol=gap * float(other.abs().max()))


@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("frozen", [(1,), (0, 1, 2)])
def test_frozen_parts_get_no_gradient(run, frozen):
    parts = Parts(torch.float32, bias=False, frozen=frozen)
    x = torch.randn(5, 8)
    found, wanted = parts.gradients(run(parts.joined), x), parts.gradients(parts.apart, x)
    assert [i for i, gradient in enumerate(found[2:]) if gradient is None] == list(frozen)
    for one, other in zip(found, wanted, strict=True):
        assert one is other is None or torch.allclose(one, other, atol=1e-5)


def test_gradients_are_the_slopes():
    parts = Parts(torch.float64, bias=True)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(parts.joined, (x,))
    # A weight is nudged where it lies, so that the whole moves with it.
    pull = torch.randn(3, sum(SIZES), dtype=torch.float64)
    slopes = torch.autograd.grad(parts.joined(x), [*parts.weights, *parts.biases], pull)
    for leaf, slope in zip([*parts.weights, *parts.biases], slopes, strict=True):
        place = (1,) * leaf.ndim
        before = parts.joined(x)
        with torch.no_grad():
            leaf[place] += 1e-3
        rise = ((parts.joined(x) - before) * pull).sum() / 1e-3
        torch.testing.assert_close(rise.detach(), slope[place], rtol=1e-6, atol=1e-6)


def test_no_rows_give_no_rows():
    parts = Parts(torch.float32, bias=True)
    assert parts.joined(torch.zeros(0, 5, 8)).shape == (0, 5, sum(SIZES))
