"""What adapters add to a linear layer, every row of a pass with one of them or none.

In: a layer's input and its product. Out: the product with the row's adapter added. A and B of all adapters lie one
after the other in one matrix each: two small products for all rows at once, and between them every column that is
not of the row's own adapter becomes zero. Nothing is gathered, nothing depends on which adapters a pass meets, and
all memory stays where it is, so that a pass can be captured in a CUDA graph. Layers whose products are joined
(``joined_linear``) share one pair. DoRA's rows are scaled by the factors of the row's adapter.

Which rows have which adapter is said by ``serving`` around the forward of the model. Compiled, this is one opaque
operation, so that the layers' own code depends neither on the rows nor on the adapters.

Shape legend: T rows of a pass, N adapters, R = N * rank columns, P parts of a joined product, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from headrace.models.wide_product import is_wide, wide_product


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which adapter each row of a pass has."""

    adapters_T: torch.Tensor
    """int64; 0 is none."""
    scales_TR: torch.Tensor
    """float32: the adapter's scaling in its own columns, zero in all others."""


@dataclass(slots=True)
class _Serving:
    rows: AdapterRows | None = None


_serving = _Serving()


@contextmanager
def serving(rows: AdapterRows | None) -> Iterator[None]:
    """Around one forward of a model; None: no row has an adapter."""
    _serving.rows = rows
    try:
        yield
    finally:
        _serving.rows = None


def current_rows() -> AdapterRows | None:
    """Of the forward that is under way; None: no row has an adapter."""
    return _serving.rows


class LowRank(nn.Module):
    """What all adapters add to one product. The tensors are no part of the model's state."""

    a: torch.Tensor
    """[P * R, I]."""
    b: torch.Tensor
    """[O, P * R], zero where a part's columns meet another part's outputs."""
    factors: torch.Tensor | None
    """[N + 1, O], 1 where nothing is scaled; None: no adapter is DoRA's."""
    bias: torch.Tensor | None
    """Of the layer, which DoRA does not scale; None where there is none or no DoRA."""

    def __init__(
        self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, *, num_rows: int, num_factors: int
    ) -> None:
        """``num_rows``: P * R. ``num_factors``: N + 1, or 0 without DoRA."""
        super().__init__()
        num_out, num_in = weight_OI.shape
        made = weight_OI.detach()
        factors = made.new_ones((num_factors, num_out)) if num_factors else None
        bias = bias_O.detach() if num_factors and bias_O is not None else None
        self.register_buffer("a", made.new_zeros((num_rows, num_in)), persistent=False)
        self.register_buffer("b", made.new_zeros((num_out, num_rows)), persistent=False)
        self.register_buffer("factors", factors, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.headrace.low_rank(x, product, self.a, self.b, self.factors, self.bias)
        return _with_adapters(x, product, self.a, self.b, self.factors, self.bias)


class AdaptedLinear(nn.Module):
    """A linear layer of its own; its parameters keep their names."""

    def __init__(self, linear: nn.Linear, low_rank: LowRank) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.low_rank = low_rank
        self._product = wide_product if is_wide(linear) else nn.functional.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.low_rank(x, self._product(x, self.weight, self.bias))


def _with_adapters(
    x: torch.Tensor,
    product: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    factors: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    rows = _serving.rows
    if rows is None:
        return product
    num_rows, columns = rows.scales_TR.shape
    inner_TPR = nn.functional.linear(x.view(num_rows, -1), a).view(num_rows, -1, columns)
    inner_TPR = (inner_TPR * rows.scales_TR[:, None]).to(x.dtype)
    inner_TR, product_TO = inner_TPR.view(num_rows, -1), product.view(num_rows, b.shape[0])
    narrow = product.dtype == x.dtype
    out_TO = torch.addmm(product_TO, inner_TR, b.T) if narrow else product_TO + inner_TR @ b.T
    if factors is not None:
        factors_TO = factors[rows.adapters_T]
        out_TO = out_TO * factors_TO if bias is None else (out_TO - bias) * factors_TO + bias
    return out_TO.view(product.shape)


@torch.library.custom_op("headrace::low_rank", mutates_args=())
def _low_rank(
    x: torch.Tensor,
    product: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    factors: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    # An operation may not hand out what it was given.
    return product.clone() if _serving.rows is None else _with_adapters(x, product, a, b, factors, bias)


@_low_rank.register_fake
def _(
    x: torch.Tensor,
    product: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    factors: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return torch.empty_like(product, memory_format=torch.contiguous_format)
