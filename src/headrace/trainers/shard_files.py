"""Tensors that lie in slices on several ranks, written whole into numbered safetensors files, and read back in
slices.

In: this rank's slice of every tensor, all ranks in the same order. Out: files of at most a few gigabytes, of
which each rank writes every n-th while the others write theirs, so no rank ever holds more than one file's
tensors whole. One file is called ``stem.safetensors``, several ``stem-00001-of-00002.safetensors``, as
Hugging Face does. The tensors of one layer share a file, because converting names for the disk may join
them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from headrace.errors import CheckpointError

FILE_BYTES = 2 << 30
_LAYER = re.compile(r".*?\.\d+\.")


class SlicedWeights(Protocol):
    """What is asked of the weights here."""

    model: PreTrainedModel
    ranks: Any

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def local(self, name: str) -> torch.Tensor: ...
    def gathered(self, name: str, local: torch.Tensor, *, to: int) -> torch.Tensor | None: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written."""

    label: str
    like: str | None
    """The weight whose slices it follows; None: every rank has all of it."""
    local: torch.Tensor
    """This rank's part."""


Tensors = dict[str, torch.Tensor]
Write = Callable[[Callable[[], None]], None]
"""Runs work that may fail on this rank alone; afterwards all ranks go on, or all raise."""


def write_files(
    directory: Path,
    stem: str,
    weights: SlicedWeights,
    entries: Sequence[Entry],
    write: Write,
    *,
    convert: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    file_bytes: int = FILE_BYTES,
) -> None:
    """``convert`` gives the tensors of whole layers the names they have on disk."""
    files = _files(weights, entries, file_bytes)
    rank, size = weights.ranks.rank, weights.ranks.size
    for first in range(0, len(files), size):
        own: Tensors = {}
        for writer, file in enumerate(files[first : first + size]):
            for entry in file:
                whole = _whole(weights, entry, to=writer)
                if whole is not None:
                    own[entry.label] = whole.detach().cpu().contiguous()
        path = directory / _file_name(stem, first + rank, len(files))
        writes = first + rank < len(files)
        write(partial(_save, convert, own, path) if writes else lambda: None)


def _save(convert: Callable[[Tensors], Tensors], tensors: Tensors, path: Path) -> None:
    save_file(convert(tensors), path, {"format": "pt"})


def write_model(
    directory: Path, weights: SlicedWeights, write: Write, *, file_bytes: int = FILE_BYTES
) -> None:
    """Weights, index and configuration in Hugging Face format."""
    from transformers.core_model_loading import revert_weight_conversion

    entries = [Entry(name, name, weights.local(name)) for name in weights.names()]

    def convert(tensors: Tensors) -> Tensors:
        reverted = revert_weight_conversion(weights.model, tensors)
        return {name: _with_own_memory(tensor) for name, tensor in reverted.items()}

    write_files(directory, "model", weights, entries, write, convert=convert, file_bytes=file_bytes)
    write(lambda: _describe(directory, weights.model) if weights.ranks.is_first else None)


def _with_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Parts of one fused tensor share its memory, which a file may not; anything else is left where it is."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _describe(directory: Path, model: PreTrainedModel) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    paths = sorted(directory.glob("model-*.safetensors"))
    if paths:
        names = {name: path.name for path in paths for name in _keys(path)}
        index = {"metadata": {"total_size": sum(p.stat().st_size for p in paths)}, "weight_map": names}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class SavedTensor:
    """A tensor in a file, of which only the rows asked for are read."""

    def __init__(self, file: Any, label: str) -> None:
        self._slice = file.get_slice(label)
        self.shape = tuple(self._slice.get_shape())

    def rows(self, rows: tuple[int, int] | None) -> torch.Tensor:
        """None: all of it."""
        if rows is None or not self.shape:
            return self._slice[...]
        start, stop = rows
        return self._slice[start:stop] if start < stop else self._slice[:1][:0]


def open_files(directory: Path, stem: str) -> dict[str, SavedTensor] | None:
    """Every tensor of a kind by its label; None where no file of that kind is there."""
    saved: dict[str, SavedTensor] = {}
    paths = sorted(directory.glob(f"{stem}*.safetensors"))
    if not paths:
        return None
    _check_numbered(directory, stem, paths)
    for path in paths:
        file = safe_open(path, framework="pt")
        saved |= {label: SavedTensor(file, label) for label in file.keys()}  # noqa: SIM118
    return saved


def _check_numbered(directory: Path, stem: str, paths: Sequence[Path]) -> None:
    """Of files that say how many they are, all must be there."""
    told = [found for path in paths if (found := re.fullmatch(rf"{stem}-\d+-of-(\d+)", path.stem))]
    if told and len(told) != int(told[0][1]):
        raise CheckpointError(
            f"checkpoint {directory}: {len(told)} of {int(told[0][1])} files of {stem} are there; copy the checkpoint "
            "whole, or remove it to resume from the one before"
        )


def _files(weights: SlicedWeights, entries: Sequence[Entry], file_bytes: int) -> list[list[Entry]]:
    """Whole layers together, as many as a file holds; one that is larger has a file of its own."""
    files: list[list[Entry]] = []
    room = 0
    for _, members in groupby(entries, key=_layer):
        layer = list(members)
        size = sum(_whole_bytes(weights, entry) for entry in layer)
        if not files or size > room:
            files.append([])
            room = file_bytes
        files[-1] += layer
        room -= size
    return files or [[]]


def _layer(entry: Entry) -> str:
    found = _LAYER.match(entry.label)
    return found[0] if found else entry.label


def _whole_bytes(weights: SlicedWeights, entry: Entry) -> int:
    count = entry.local.numel() if entry.like is None else math.prod(weights.shape(entry.like))
    return count * entry.local.element_size()


def _whole(weights: SlicedWeights, entry: Entry, *, to: int) -> torch.Tensor | None:
    if entry.like is not None:
        return weights.gathered(entry.like, entry.local, to=to)
    return entry.local if weights.ranks.rank == to else None


def _file_name(stem: str, index: int, count: int) -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"


def _keys(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())
