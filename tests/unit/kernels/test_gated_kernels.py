"""Kernels of gated layers against float64, whatever the edges of their tiles cut off."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, HALF, TOLERANCE, relative_error, require_kernels
from torch.nn import functional as F

require_kernels()

from headrace.kernels import gated, gated_library  # noqa: E402
from headrace.kernels.chip import Chip  # noqa: E402
from headrace.kernels.gated import (  # noqa: E402
    GatedWeights,
    gate,
    gate_gradients,
    in_pairs,
    product_gradients,
    tiled_product,
)
from headrace.kernels.gated_tiles import Tiles  # noqa: E402

FEW, MANY = Tiles(16, 64, 64, 4, 3, True, 1), Tiles(64, 64, 32, 4, 3, False, 2)


def layer(num_rows: int, num_inputs: int, width: int) -> tuple[torch.Tensor, GatedWeights, torch.Tensor]:
    """Rows and weights on the device, and both products in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((num_rows, num_inputs), generator=generator).to(HALF)
    whole = (torch.randn((2 * width, num_inputs), generator=generator) * num_inputs**-0.5).to(HALF)
    weights = GatedWeights(*whole.to(DEVICE).split(width), None)
    return x.to(DEVICE), weights, x.double() @ whole.double().T


def one_rounding(exact: torch.Tensor) -> float:
    return relative_error(exact.to(HALF), exact)


def made(products: torch.Tensor) -> torch.Tensor:
    of_gate, up = products.chunk(2, -1)
    return F.silu(of_gate) * up


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("tiles", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "width"), [(1, 64, 64), (13, 72, 80), (150, 128, 192), (300, 40, 72)]
)
def test_products_are_those_of_float64(tiles, keep, num_rows, num_inputs, width):
    x, weights, products = layer(num_rows, num_inputs, width)
    inner, kept = tiled_product(x, weights, tiles, keep=keep)
    # Were both products rounded before they meet, it would be 1.7 times as far.
    assert relative_error(inner, made(products)) < 1.1 * one_rounding(made(products))
    assert (kept is None) != keep
    if kept is not None:
        assert relative_error(kept, in_pairs(products)) < TOLERANCE[HALF]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (5, 1024), (3, 1500)])
def test_a_pass_over_products(dtype, num_rows, width):
    products = torch.randn((num_rows, 2 * width), device=DEVICE).to(dtype)
    inner, exact = gate(products, HALF), made(products.cpu().double())
    assert inner.dtype == HALF
    assert relative_error(inner, exact) < 1.2 * one_rounding(exact)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (5, 1024), (3, 1500)])
def test_gradients_are_those_of_float64(num_rows, width):
    products = torch.randn((num_rows, 2 * width), device=DEVICE).to(HALF)
    grad = torch.randn((num_rows, width), device=DEVICE).to(HALF)
    right = products.cpu().double().requires_grad_()
    value = made(right)
    value.backward(grad.cpu().double())
    grads, inner = gate_gradients(grad, in_pairs(products))
    assert relative_error(grads, right.grad) < TOLERANCE[HALF]
    assert relative_error(inner, value.detach()) < TOLERANCE[HALF]


def test_no_rows_give_no_rows():
    x, weights, _ = layer(0, 64, 64)
    inner, kept = tiled_product(x, weights, FEW, keep=True)
    assert inner.shape == (0, 64) and kept is not None and kept.shape == (0, 128)
    grads, again = gate_gradients(inner, kept)
    assert grads.shape == (0, 128) and again.shape == (0, 64) and gate(kept, HALF).shape == (0, 64)


@pytest.mark.parametrize("joined", [False, True])
def test_torchs_products_are_kept_in_pairs_too(monkeypatch, joined):
    """As on GPUs for which there is no kernel; more rows than are multiplied at once."""

    def product(a, b, *, out_dtype):
        return a.to(out_dtype) @ b.to(out_dtype)

    monkeypatch.setattr(gated.torch, "mm", product)
    monkeypatch.setattr(gated, "_ROWS_AT_ONCE", 8)
    x, apart, products = layer(19, 24, 40)
    whole = torch.cat((apart.gate, apart.up))
    inner, kept = gated.by_torch(x, apart._replace(whole=whole if joined else None), keep=True)
    assert relative_error(inner, made(products)) < 1.1 * one_rounding(made(products))
    assert kept is not None and kept.is_contiguous()
    assert relative_error(kept, in_pairs(products)) < TOLERANCE[HALF]


@pytest.mark.parametrize(
    ("generation", "installed", "joined", "num_rows", "who"),
    [
        (9, True, True, 512, "library"),
        (9, True, False, 512, "tiles"),
        (9, False, True, 512, "tiles"),
        (9, True, True, 24, "tiles"),
        (9, True, True, 144, "torch"),
        (10, True, True, 512, "torch"),
    ],
)
def test_who_computes_a_gated_product(monkeypatch, generation, installed, joined, num_rows, who):
    monkeypatch.setattr(gated, "chip", lambda _: Chip(generation, 132))
    monkeypatch.setattr(gated_library, "is_installed", lambda: installed)
    monkeypatch.setattr(gated_library, "library_product", lambda *_, **__: "library")
    monkeypatch.setattr(gated, "tiled_product", lambda *_, **__: "tiles")
    monkeypatch.setattr(gated, "by_torch", lambda *_, **__: "torch")
    x, whole = torch.zeros((num_rows, 1536)), torch.zeros((2 * 8960, 1536))
    weights = GatedWeights(*whole.split(8960), whole if joined else None)
    assert gated.gated_product(x, weights, keep=False) == who


@pytest.mark.parametrize(
    ("generation", "installed", "num_rows", "who"),
    [
        (9, True, 1300, "library"),
        (9, True, 1000, "pass"),
        (9, False, 1300, "pass"),
        (10, True, 1300, "pass"),
    ],
)
def test_who_makes_gradients(monkeypatch, generation, installed, num_rows, who):
    monkeypatch.setattr(gated, "chip", lambda _: Chip(generation, 132))
    monkeypatch.setattr(gated_library, "is_installed", lambda: installed)
    monkeypatch.setattr(gated_library, "library_gradients", lambda *_: "library")
    monkeypatch.setattr(gated, "gate_gradients", lambda grad, _: "pass" if grad.shape[1] == 16 else "wrong")
    shapes = (num_rows, 8), (8, 16), (num_rows, 32)
    assert product_gradients(*(torch.zeros(shape) for shape in shapes)) == who
