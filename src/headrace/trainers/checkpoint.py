"""A trainer's state on disk: weights any tool can load, and what training needs to go on bit for bit.

    config.json, model.safetensors, ...   Hugging Face format; tokenizer files beside them
    adapter_config.json, ...              in peft's format instead, where only an adapter is trained
    optimizer.safetensors                 AdamW moments and counts, by parameter name
    reference.safetensors                 weights of the KL reference, where there is one
    rng.safetensors                       torch generators: cpu, and cuda where used
    trainer.json                          step, version, format

Large tensors lie in several numbered files of a kind (``shard_files``), and every tensor lies there whole: the
number of ranks that wrote a checkpoint is not part of it, and any number can read it. In: an existing
empty directory. Every file is flushed to the disk before ``save_state`` returns on the first rank; nothing is
pickled. Whether the directory is complete is its owner's business, which renames it into place.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError
from headrace.trainers.peft_adapter import AdapterModule
from headrace.trainers.placement import Weights
from headrace.trainers.ranks import Ranks
from headrace.trainers.shard_files import Entry, open_files, write_files, write_model
from headrace.trainers.sharded_adapter import ShardedAdapterWeights, write_adapter
from headrace.trainers.sharded_weights import ShardedWeights

FORMAT = 1
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Position:
    """How far training has come."""

    step: int
    version: int


def save_state(
    directory: Path,
    *,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    reference: Weights | None,
    tokenizer_dir: Path | None,
    position: Position,
) -> None:
    """Called on every rank; fails on all of them where it fails on one."""
    ranks = weights.ranks
    write = _Together(ranks, f"checkpoint {directory}: could not be written", _REMEDY_WRITE)
    if isinstance(weights, ShardedAdapterWeights):
        write_adapter(directory, weights, write)
    elif isinstance(weights, ShardedWeights):
        write_model(directory, weights, write)
    else:
        write(lambda: weights.model.save_pretrained(directory))
    write_files(directory, "optimizer", weights, list(_optimizer_entries(weights, optimizer)), write)
    if reference is not None:
        entries = [Entry(name, name, reference.local(name)) for name in reference.names()]
        write_files(directory, "reference", reference, entries, write)
    write(lambda: _write_rest(directory, tokenizer_dir, position) if ranks.is_first else None)


_REMEDY_WRITE = "free space or choose another directory"
_REMEDY_READ = "resume from another checkpoint"


class _Together:
    """Runs a piece of work on every rank; where it fails on one, all raise, and none is left waiting."""

    def __init__(self, ranks: Ranks, what: str, remedy: str) -> None:
        self._ranks, self._what, self._remedy = ranks, what, remedy

    def __call__(self, work: Callable[[], T]) -> T:
        own, result, cause = "", None, cast(Exception | None, None)
        try:
            result = work()
        except CheckpointError as error:
            own, cause = str(error), error
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            own, cause = f"{self._what} ({error}); {self._remedy}", error
        problems = self._ranks.problems(own)
        if problems:
            raise CheckpointError(problems) from cause
        return cast(T, result)


def _write_rest(directory: Path, tokenizer_dir: Path | None, position: Position) -> None:
    save_file(_rng_tensors(), directory / "rng.safetensors")
    if tokenizer_dir is not None:
        copy_tokenizer(tokenizer_dir, directory)
    head = {"format": FORMAT, "step": position.step, "version": position.version}
    (directory / "trainer.json").write_text(json.dumps(head) + "\n")
    _flush(directory)


def load_state(
    directory: Path, *, weights: Weights, optimizer: torch.optim.Optimizer, reference: Weights | None
) -> Position:
    """Called on every rank; fails on all of them where it fails on one."""
    read = _Together(weights.ranks, f"checkpoint {directory}: could not be restored", _REMEDY_READ)
    position = read(lambda: _read_head(directory))
    whole = read(lambda: _saved_weights(directory, weights) if weights.ranks.is_first else None)
    weights.fill(whole)
    del whole
    read(lambda: _restore_optimizer(directory, weights, optimizer))
    if reference is not None:
        read(lambda: _restore_reference(directory, reference))
    read(lambda: _restore_rng(load_file(directory / "rng.safetensors")))
    return position


def _read_head(directory: Path) -> Position:
    head = json.loads((directory / "trainer.json").read_text())
    if head["format"] != FORMAT:
        raise CheckpointError(
            f"checkpoint {directory}: format {head['format']} is not {FORMAT}; "
            "use the version of headrace that wrote it"
        )
    return Position(step=int(head["step"]), version=int(head["version"]))


def copy_tokenizer(source: Path, directory: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _saved_weights(directory: Path, weights: Weights) -> Mapping[str, torch.Tensor]:
    """Through ``from_pretrained``, since names on disk may differ from those in memory (fused experts)."""
    model = weights.model
    if isinstance(model, AdapterModule):
        return model.read(directory)
    saved, info = type(model).from_pretrained(directory, dtype=model.dtype, output_loading_info=True)
    if info["missing_keys"]:
        raise CheckpointError(
            f"checkpoint {directory}: tensor {min(info['missing_keys'])!r} is missing; "
            "it belongs to another model"
        )
    tensors = saved.state_dict()
    for name in weights.names():
        if name not in tensors or tuple(tensors[name].shape) != weights.shape(name):
            raise CheckpointError(
                f"checkpoint {directory}: tensor {name!r} does not fit the model; it belongs to another one"
            )
    return tensors


@torch.no_grad()
def _restore_reference(directory: Path, reference: Weights) -> None:
    saved = open_files(directory, "reference")
    if saved is None:
        raise CheckpointError(
            f"checkpoint {directory}: it was written without a KL reference; resume with kl set to 'none'"
        )
    reference.release()
    for name in reference.names():
        if name not in saved or saved[name].shape != reference.shape(name):
            raise CheckpointError(
                f"checkpoint {directory}: tensor {name!r} of the reference is missing or does not fit; "
                "it belongs to another model"
            )
        reference.local(name).copy_(saved[name].rows(reference.own_rows(name)))


def _optimizer_entries(weights: Weights, optimizer: torch.optim.Optimizer) -> Iterator[Entry]:
    for name, parameter in weights.model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            # A count is the same on every rank, a moment lies where its parameter does.
            like = name if value.ndim else None
            yield Entry(f"{name}:{key}", like, weights.local_of(value))


def _restore_optimizer(directory: Path, weights: Weights, optimizer: torch.optim.Optimizer) -> None:
    parameters = dict(weights.model.named_parameters())
    saved = open_files(directory, "optimizer")
    if saved is None:
        raise CheckpointError(f"checkpoint {directory}: optimizer.safetensors is missing; {_REMEDY_READ}")
    optimizer.state.clear()
    if weights.host_memory is not None:
        weights.host_memory.forget()
    for label, tensor in saved.items():
        name, _, key = label.rpartition(":")
        parameter = parameters[name]
        rows = weights.own_rows(name) if tensor.shape else None
        optimizer.state[parameter][key] = weights.placed_like(parameter, tensor.rows(rows), key)


def _rng_tensors() -> dict[str, torch.Tensor]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def _restore_rng(tensors: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def _flush(directory: Path) -> None:
    for path in [*sorted(p for p in directory.rglob("*") if p.is_file()), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
