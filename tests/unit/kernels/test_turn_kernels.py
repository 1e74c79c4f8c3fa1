"""Heads rotated out of their product and gradients turned back, against the plain form in float64."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, HALF, require_kernels

require_kernels()

from headrace.kernels import turn  # noqa: E402
from headrace.kernels.rotation import Rotation, rotated  # noqa: E402
from headrace.kernels.turn import turn_gradients, turn_heads  # noqa: E402

# Query heads, key heads, head dim: of models, and of a half that is no power of two.
HEADS = [(14, 2, 64), (12, 2, 128), (28, 4, 128), (3, 3, 80), (1, 1, 8)]
DTYPES = [torch.float32, HALF]
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def given(num_rows: int, heads: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, Rotation]:
    """Angles of their own for every number: nothing is the same in both halves of a head."""
    num_query, num_key, dim = heads
    generator = torch.Generator().manual_seed(num_rows)
    product = torch.randn((num_rows, (num_query + 2 * num_key) * dim), generator=generator)
    angles = torch.randn((2, num_rows, dim), generator=generator)
    cos, sin = torch.stack((angles[0].cos(), angles[1].sin())).to(dtype).to(DEVICE)
    return product.to(dtype).to(DEVICE), Rotation(cos, sin)


def plain(product: torch.Tensor, rotation: Rotation, num_query: int) -> tuple[torch.Tensor, ...]:
    """In the dtype it is given."""
    cos, sin = (part.unsqueeze(1) for part in rotation)
    heads = product.unflatten(1, (-1, cos.shape[-1]))
    num_key = (heads.shape[1] - num_query) // 2
    *turning, value = heads.split((num_query, num_key, num_key), dim=1)
    turned = []
    for part in turning:
        first, second = part.chunk(2, dim=-1)
        turned.append(part * cos + torch.cat((-second, first), dim=-1) * sin)
    return *turned, value


def wide(tensors):
    return [tensor.detach().cpu().double() for tensor in tensors]


def assert_rounded_once(found: torch.Tensor, right: torch.Tensor) -> None:
    """As near as its dtype lets it be, a number that is a difference of two larger ones included."""
    assert found.shape == right.shape and found.is_contiguous()
    gap = (found.cpu().double() - right).abs()
    assert bool((gap <= ROUNDING[found.dtype] * right.abs() + 1e-6).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 37])
@pytest.mark.parametrize("heads", HEADS)
def test_heads_and_gradients_are_those_of_float64(heads, num_rows, dtype):
    product, rotation = given(num_rows, heads, dtype)
    exact = product.cpu().double().requires_grad_()
    right = plain(exact, Rotation(*wide(rotation)), heads[0])
    found = turn_heads(product, rotation, heads[0])
    for one, other in zip(found, right, strict=True):
        assert_rounded_once(one, other.detach())
    assert torch.equal(found[2].flatten(1), product[:, -found[2][0].numel() :])

    grads = [torch.randn_like(part) for part in found]
    (right_grad,) = torch.autograd.grad(right, exact, wide(grads))
    assert_rounded_once(turn_gradients(*grads, rotation), right_grad)


@pytest.mark.parametrize("tile", [64, 1 << 14])
def test_programs_of_any_size(tile, monkeypatch):
    monkeypatch.setattr(turn, "_TILE", tile)
    product, rotation = given(5, (12, 2, 128), torch.float32)
    found = turn_heads(product, rotation, 12)
    for one, other in zip(found, plain(product, rotation, 12), strict=True):
        torch.testing.assert_close(one, other)


def test_it_rotates_as_attention_of_engines_does():
    product, rotation = given(9, (4, 2, 64), HALF)
    query, key, _ = turn_heads(product, rotation, 4)
    heads = product.unflatten(1, (-1, 64))
    for found, unturned in ((query, heads[:, :4]), (key, heads[:, 4:6])):
        torch.testing.assert_close(found, rotated(unturned, rotation), rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_values_are_copied_whatever_they_are():
    product, rotation = given(3, (2, 1, 16), HALF)
    product[:, -16:] = float("inf")
    query, key, value = turn_heads(product, rotation, 2)
    assert bool(value.isinf().all() and query.isfinite().all() and key.isfinite().all())
    grad = turn_gradients(query, key, value, rotation)
    assert bool(grad[:, -16:].isinf().all() and grad[:, :-16].isfinite().all())


def test_no_rows():
    product, rotation = given(0, (2, 1, 16), HALF)
    parts = turn_heads(product, rotation, 2)
    assert [part.shape for part in parts] == [(0, 2, 16), (0, 1, 16), (0, 1, 16)]
    assert turn_gradients(*parts, rotation).shape == (0, 64)
