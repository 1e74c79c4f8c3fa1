"""The names that tensors have in a checkpoint, for weights that leave the machine.

In: a model. Out: its tensors under the names of its checkpoint. Transformers fuses experts in memory (all gates and
ups of a layer are one tensor) and takes them apart again when it saves; its own table says how, so that is asked, with
copies turned off. What it then answers with are views of the model's memory: reading them reads the model, and
writing them writes it. Within a machine weights travel as they lie in memory, since a few large tensors are handled
faster than many small ones.

Where a conversion computes something (reorders heads, for one), its results are no views and the tensor keeps the
name it has in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from headrace.models.tensors import named_tensors
from headrace.protocols import WeightSender
from headrace.types import BundleKind, TensorBlob, WeightManifest


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint: a run of elements of one in memory."""

    name: str
    shape: tuple[int, ...]
    start: int


Table = Mapping[str, Sequence[Piece]]
"""By name in memory; tensors that have one name in both are not in it."""


def checkpoint_table(model: PreTrainedModel) -> Table:
    """Which tensors of the checkpoint make up which tensor in memory."""
    table = {}
    for name, tensor in named_tensors(model).items():
        pieces = _pieces(model, name, tensor.detach())
        if [piece.name for piece in pieces] != [name]:
            table[name] = pieces
    return table


class Weights:
    """A model's tensors under either set of names."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.in_memory = named_tensors(model)
        table = checkpoint_table(model)
        self._in_checkpoint: dict[str, torch.Tensor] = {}
        for name, tensor in self.in_memory.items():
            for piece in table.get(name, ()):
                share = tensor.detach().view(-1)[piece.start : piece.start + _size(piece)]
                self._in_checkpoint[piece.name] = share.view(piece.shape)
            if name not in table:
                self._in_checkpoint[name] = tensor

    def called(self, names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        """The tensors under the names that an update uses."""
        return self.in_memory if set(names) <= self.in_memory.keys() else self._in_checkpoint


class CheckpointNamed:
    """A sender whose bundles name tensors as the model's checkpoint does."""

    def __init__(self, sender: WeightSender, model: PreTrainedModel) -> None:
        self._sender = sender
        self._table = checkpoint_table(model)

    def send(
        self, version: int, blobs: Iterable[TensorBlob], *, kind: BundleKind | None = None
    ) -> WeightManifest:
        return self._sender.send(version, split(self._table, blobs), kind=kind)

    def retire(self, version: int) -> None:
        self._sender.retire(version)

    def close(self) -> None:
        self._sender.close()


def split(table: Table, blobs: Iterable[TensorBlob]) -> Iterator[TensorBlob]:
    """The same bytes, in the pieces and under the names of the checkpoint."""
    for blob in blobs:
        if blob.name not in table:
            yield blob
            continue
        width = blob.data.nbytes // sum(map(_size, table[blob.name]))
        for piece in table[blob.name]:
            data = blob.data[piece.start * width : (piece.start + _size(piece)) * width]
            yield TensorBlob(name=piece.name, dtype=blob.dtype, shape=piece.shape, data=data)


class _NoCopies(TorchFunctionMode):
    """Tensors stay where they are when asked to become contiguous."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _pieces(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> list[Piece]:
    with _NoCopies():
        saved = revert_weight_conversion(model, {name: tensor})
    whole, base = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    pieces = [
        Piece(new_name, tuple(part.shape), part.storage_offset() - base) for new_name, part in saved.items()
    ]
    runs = all(p.untyped_storage().data_ptr() == whole and p.is_contiguous() for p in saved.values())
    if not runs or not tensor.is_contiguous() or sum(map(_size, pieces)) != tensor.numel():
        return [Piece(name, tuple(tensor.shape), 0)]
    return sorted(pieces, key=lambda piece: piece.start)


def _size(piece: Piece) -> int:
    size = 1
    for length in piece.shape:
        size *= length
    return size
