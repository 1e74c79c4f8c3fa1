"""Room for several adapters beside the weights of one model.

In: a model, how many adapters of which rank it must hold, and later their tensors as the trainer publishes them.
Out: the same model, whose target layers and experts add the adapter of each row (``low_rank``, ``expert_low_rank``).
Memory for all adapters is made once and never moves. An adapter is replaced whole or not at all, and no other is
touched.

Adapters are numbered from 1; 0 is the model alone. Joined layers must have been joined before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.errors import WeightSyncError
from headrace.models.expert_low_rank import AdaptedExperts, ExpertLowRank
from headrace.models.joined_linear import joined_groups
from headrace.models.lora import LoraSpec, target_experts, target_linears
from headrace.models.low_rank import AdaptedLinear, AdapterRows, LowRank
from headrace.models.tensors import Update, as_tensor, dtype_name
from headrace.types import TensorBlob

if TYPE_CHECKING:
    from headrace.kernels.many_copies import ManyCopies

SCALING = "scaling"
_Layout = dict[str, tuple[str, tuple[int, ...], int]]
"""Type, shape and bytes of every tensor of an adapter, by name."""
_A, _B, _FACTOR = ".lora_A.weight", ".lora_B.weight", ".row_factor"


@dataclass(frozen=True, slots=True)
class _Part:
    """Where the adapters of one layer lie."""

    low: LowRank
    row: int
    """Of the first adapter in A, and its column in B."""
    start: int
    stop: int
    """The layer's outputs within its product."""

    def of(self, adapter: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """A [rank, inputs], B [outputs, rank] and row factors of one adapter, to be written."""
        low, at, outputs = self.low, self.row + (adapter - 1) * rank, slice(self.start, self.stop)
        factors = None if low.factors is None else low.factors[adapter, outputs]
        return low.a[at : at + rank], low.b[outputs, at : at + rank], factors


@dataclass(frozen=True, slots=True)
class _ExpertPart:
    """Where the adapters of one weight of all experts lie."""

    low: ExpertLowRank

    def of(self, adapter: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, None]:
        """A [experts, rank, inputs] and B [experts, outputs, rank] of one adapter, to be written."""
        columns = slice((adapter - 1) * rank, adapter * rank)
        return self.low.a[:, columns], self.low.b[:, :, columns], None


class _Places:
    """Where the tensors of an adapter go, told once: the next version usually looks like the last."""

    def __init__(self, layout: _Layout, views: dict[str, torch.Tensor]) -> None:
        self.layout = layout
        self._views = views
        self._at_once: ManyCopies | None = None

    def fill(self, arrived: Mapping[str, TensorBlob]) -> None:
        """From GPU memory in one launch, since decoding stands still meanwhile."""
        blobs = [arrived[name] for name in self._views]
        if not all(isinstance(blob.data, torch.Tensor) for blob in blobs):
            for view, blob in zip(self._views.values(), blobs, strict=True):
                view.copy_(as_tensor(blob))
            return
        if self._at_once is None:
            from headrace.kernels.many_copies import ManyCopies

            self._at_once = ManyCopies(list(self._views.values()))
        self._at_once.copy_from([blob.data for blob in blobs])


class AdapterBank:
    """The model's target layers are replaced for good; their parameters keep their names."""

    def __init__(self, model: PreTrainedModel, spec: LoraSpec, num_adapters: int) -> None:
        """``spec``: the largest rank of any adapter, all layers that any may change, and DoRA if any is."""
        self.num_adapters, self.rank = num_adapters, spec.rank
        self._dtype = model.dtype
        self._places: dict[int, _Places] = {}
        shape = (num_adapters + 1, num_adapters * spec.rank)
        self._scales = torch.zeros(shape, dtype=torch.float32, device=model.device)
        targets = target_linears(model, spec.targets)
        experts = target_experts(model, spec.targets, dora=spec.dora)
        self._parts: dict[str, _Part | _ExpertPart] = {
            **_attach(model, targets, num_adapters, spec),
            **_attach_experts(model, experts, num_adapters * spec.rank),
        }

    def rows(self, adapters_T: torch.Tensor) -> AdapterRows:
        """For a pass whose rows have these adapters."""
        return AdapterRows(adapters_T, self._scales[adapters_T])

    @property
    def products(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of every product that is computed beside the layers' own; those of experts, whose number
        of rows depends on the rows beside them, are not counted."""
        dense = [part.low for part in self._parts.values() if isinstance(part, _Part)]
        matrices = [matrix for low in dense for matrix in (low.a, low.b)]
        return sorted({(matrix.shape[1], matrix.shape[0]) for matrix in matrices})

    @torch.no_grad()
    def load(self, adapter: int, updates: Iterable[Update]) -> None:
        """Replace an adapter; layers it has no tensors for are left to the model. Raises WeightSyncError, with
        nothing changed, if it does not fit."""
        arrived = {blob.name: blob for blob in updates if isinstance(blob, TensorBlob)}
        layout = {name: (blob.dtype, tuple(blob.shape), blob.data.nbytes) for name, blob in arrived.items()}
        places = self._places.get(adapter)
        if places is None or places.layout != layout:
            places = self._places[adapter] = self._clear(adapter, layout)
        places.fill(arrived)
        own = slice((adapter - 1) * self.rank, adapter * self.rank)
        self._scales[adapter, own].copy_(as_tensor(arrived[SCALING]).expand(self.rank))

    def tensors(self, adapter: int) -> dict[str, torch.Tensor]:
        """What is computed with for one adapter, where it lies, by the names it arrives under."""
        column = (adapter - 1) * self.rank
        found = {SCALING: self._scales[adapter, column : column + 1]}
        for name, part in self._parts.items():
            a, b, factors = part.of(adapter, self.rank)
            found |= {name + _A: a, name + _B: b}
            if factors is not None:
                found[name + _FACTOR] = factors
        return found

    def _clear(self, adapter: int, layout: _Layout) -> _Places:
        """Where tensors of this layout go; all that it has none for is left to the model from now on."""
        ranks = self._check(layout)
        views: dict[str, torch.Tensor] = {}
        for name, part in self._parts.items():
            a, b, factors = part.of(adapter, self.rank)
            rank = ranks.get(name, 0)
            a[..., rank:, :].zero_()
            b[..., rank:].zero_()
            if rank:
                views |= {name + _A: a[..., :rank, :], name + _B: b[..., :rank]}
            if factors is not None and name + _FACTOR in layout:
                views[name + _FACTOR] = factors
            elif factors is not None:
                factors.fill_(1.0)
        return _Places(layout, views)

    def _check(self, found: _Layout) -> dict[str, int]:
        """The rank in every layer the adapter changes."""
        ranks = {
            name.removesuffix(_A): shape[-2] if len(shape) > 1 else 0
            for name, (_, shape, _) in found.items()
            if name.endswith(_A)
        }
        expected: _Layout = {SCALING: ("F32", (1,), 4)}
        for name, rank in ranks.items():
            part = self._parts.get(name)
            if part is None or not 1 <= rank <= self.rank:
                raise WeightSyncError(
                    f"the adapter changes {name!r} at rank {rank}, and the engine has room for rank {self.rank} in "
                    f"{len(self._parts)} layers ({', '.join(list(self._parts)[:2])}, ...); start both with the same "
                    "lora settings"
                )
            a, b, factors = part.of(1, self.rank)
            expected[name + _A] = self._told((*a.shape[:-2], rank, a.shape[-1]))
            expected[name + _B] = self._told((*b.shape[:-1], rank))
            if factors is not None and name + _FACTOR in found:
                expected[name + _FACTOR] = self._told(tuple(factors.shape))
        if not ranks or found != expected:
            wrong = sorted(name for name in found | expected if found.get(name) != expected.get(name))
            raise WeightSyncError(
                f"the update is not an adapter of this model in {dtype_name(self._dtype)} (see {wrong[:2]}); start "
                "sender and engine with the same model, dtype and lora settings"
            )
        return ranks

    def _told(self, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
        return dtype_name(self._dtype), shape, math.prod(shape) * self._dtype.itemsize


def _attach(
    model: PreTrainedModel, targets: Sequence[str], num_adapters: int, spec: LoraSpec
) -> dict[str, _Part]:
    """Put the memory of the adapters beside each target's product."""
    columns, num_factors = num_adapters * spec.rank, num_adapters + 1 if spec.dora else 0
    names = {model.get_submodule(name): name for name in targets}
    parts: dict[str, _Part] = {}
    for name in targets:
        linear = model.get_submodule(name)
        if isinstance(linear, nn.Linear):
            low = LowRank(linear.weight, linear.bias, num_rows=columns, num_factors=num_factors)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, AdaptedLinear(linear, low))
            parts[name] = _Part(low, 0, 0, linear.out_features)
    for layers in joined_groups(model):
        members = [layer for layer in layers if layer in names]
        if members:
            low = LowRank(*layers[0].joined, num_rows=len(members) * columns, num_factors=num_factors)
            layers[0].beside = low
            for number, layer in enumerate(members):
                stop = layer.start + layer.out_features
                parts[names[layer]] = _Part(low, number * columns, layer.start, stop)
    return {name: parts[name] for name in targets}


def _attach_experts(
    model: PreTrainedModel, weights: Sequence[str], num_columns: int
) -> dict[str, _Part | _ExpertPart]:
    """Put the memory of the adapters beside the products of the experts with these weights."""
    parts: dict[str, _Part | _ExpertPart] = {}
    lows: dict[str, dict[str, ExpertLowRank]] = {}
    for name in weights:
        parent, _, own = name.rpartition(".")
        low = ExpertLowRank(model.get_parameter(name), num_columns)
        lows.setdefault(parent, {})[own] = low
        parts[name] = _ExpertPart(low)
    for name, low_ranks in lows.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, AdaptedExperts(model.get_submodule(name), low_ranks))
    return parts
