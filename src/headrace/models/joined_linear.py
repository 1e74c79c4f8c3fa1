"""Linear layers that read the same input, computed as one product.

In: a model with query, key and value projections, or gate and up projections, as layers of their own. Out: the
same model, whose parameters keep their names and are now parts of one larger matrix, so that loading weights
in place still works. The first of them computes all, and what is put beside it (``beside``) changes the product
of all; the others hand out their share. For a few rows a product
costs its weights' way through memory plus a fixed toll, and this pays the toll once. Where weights are trained
(``joined_product``), narrow products that leave much of a GPU idle become part of a wide one, and their input gets one
gradient instead of several that are added up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from headrace.models.joined_product import joined_product

QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
_TOGETHER = (QUERY_KEY_VALUE, GATE_UP)


def join_linears(model: nn.Module, together: Sequence[Sequence[str]] = _TOGETHER) -> int:
    """Join what can be joined of layers named ``together``, for good; returns how many products were saved."""
    saved = 0
    for module in list(model.modules()):
        for names in together:
            parts = [getattr(module, name, None) for name in names]
            linears = [part for part in parts if type(part) is nn.Linear]
            if len(linears) == len(names) and _alike(linears):
                for name, share in zip(names, _joined(linears), strict=True):
                    setattr(module, name, share)
                saved += len(names) - 1
    return saved


class _Shares:
    """The product of one call, until every layer has taken its share."""

    def __init__(self) -> None:
        self.layers: list[JoinedLinear] = []
        self.left = 0
        self.product: torch.Tensor | None = None


class JoinedLinear(nn.Module):
    """One of several layers; the first, which is called first, has the joined matrix."""

    _joined_weight: torch.Tensor
    _joined_bias: torch.Tensor | None

    def __init__(
        self, linear: nn.Linear, start: int, shares: _Shares, joined: Sequence[torch.Tensor | None] | None
    ) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.out_features = linear.out_features
        self.start = start
        self.shares = shares
        shares.layers.append(self)
        self.beside: nn.Module | None = None
        """Of the first layer: called with the input and the product, gives the product to use."""
        self._is_first = joined is not None
        weight, bias = joined if joined is not None else (None, None)
        self.register_buffer("_joined_weight", weight, persistent=False)
        self.register_buffer("_joined_bias", bias, persistent=False)

    @property
    def joined(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of the whole product, at the first layer."""
        return self._joined_weight, self._joined_bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.shares
        if self._is_first:
            product = self.product(x)
            shares.product = product if self.beside is None else self.beside(x, product)
            shares.left = len(shares.layers)
        whole = shares.product
        assert whole is not None, "joined layers must be called first to last, once each"
        shares.left -= 1
        if shares.left == 0:
            shares.product = None
        return whole[..., self.start : self.start + self.out_features]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Of all layers, at the first; without what is put beside it."""
        layers = self.shares.layers
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        if not torch.is_grad_enabled() or not any(part.requires_grad for part in (*weights, *biases)):
            return nn.functional.linear(x, self._joined_weight, self._joined_bias)
        return joined_product(x, self._joined_weight, self._joined_bias, weights, biases)


def joined_groups(model: nn.Module) -> list[list[JoinedLinear]]:
    """The layers of each joined product, the first one first."""
    groups: dict[int, list[JoinedLinear]] = {}
    for module in model.modules():
        if isinstance(module, JoinedLinear):
            groups.setdefault(id(module.shares), []).append(module)
    return [sorted(layers, key=lambda layer: layer.start) for layers in groups.values()]


def _alike(linears: Sequence[nn.Linear]) -> bool:
    first = linears[0]
    return all(
        other.in_features == first.in_features and (other.bias is None) == (first.bias is None)
        for other in linears
    )


def _joined(linears: Sequence[nn.Linear]) -> list[JoinedLinear]:
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    shares, start = _Shares(), 0
    layers: list[JoinedLinear] = []
    for linear in linears:
        stop = start + linear.out_features
        linear.weight.data = weight[start:stop]
        if bias is not None:
            linear.bias.data = bias[start:stop]
        layers.append(JoinedLinear(linear, start, shares, None if layers else (weight, bias)))
        start = stop
    return layers
