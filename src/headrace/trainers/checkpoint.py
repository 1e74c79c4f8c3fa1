"""A trainer's state on disk: weights any tool can load, and what training needs to go on bit for bit.

    config.json, model.safetensors, ...   Hugging Face format; tokenizer files beside them
    adapter_config.json, ...              in peft's format instead, where only an adapter is trained
    optimizer.safetensors                 AdamW moments and counts, by parameter name
    reference.safetensors                 weights of the KL reference, where there is one
    rng.safetensors                       torch generators: cpu, and cuda where used
    trainer.json                          step, version, format

In: an existing empty directory. Every file is flushed to the disk before ``save`` returns; nothing is
pickled. Whether the directory is complete is its owner's business, which renames it into place.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from headrace.errors import CheckpointError
from headrace.models.tensors import named_tensors
from headrace.trainers.adapter_weights import AdapterModule

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


@dataclass(frozen=True, slots=True)
class Position:
    """How far training has come."""

    step: int
    version: int


def save_state(
    directory: Path,
    *,
    model: PreTrainedModel | AdapterModule,
    optimizer: torch.optim.Optimizer,
    reference: nn.Module | None,
    tokenizer_dir: Path | None,
    position: Position,
) -> None:
    try:
        model.save_pretrained(directory)
        save_file(_optimizer_tensors(model, optimizer), directory / "optimizer.safetensors")
        if reference is not None:
            save_file(_contiguous(named_tensors(reference)), directory / "reference.safetensors")
        save_file(_rng_tensors(), directory / "rng.safetensors")
        if tokenizer_dir is not None:
            copy_tokenizer(tokenizer_dir, directory)
        head = {"format": FORMAT, "step": position.step, "version": position.version}
        (directory / "trainer.json").write_text(json.dumps(head) + "\n")
        _flush(directory)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {directory}: could not be written ({error}); free space or choose another directory"
        ) from error


def load_state(
    directory: Path,
    *,
    model: PreTrainedModel | AdapterModule,
    optimizer: torch.optim.Optimizer,
    reference: nn.Module | None,
) -> Position:
    try:
        head = json.loads((directory / "trainer.json").read_text())
        if head["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {directory}: format {head['format']} is not {FORMAT}; "
                "use the version of headrace that wrote it"
            )
        if isinstance(model, AdapterModule):
            model.restore(directory)
        else:
            _restore_weights(directory, model)
        _restore_optimizer(model, optimizer, load_file(directory / "optimizer.safetensors"))
        if reference is not None:
            _restore_reference(directory, reference)
        _restore_rng(load_file(directory / "rng.safetensors"))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {directory}: could not be restored ({error}); resume from another checkpoint"
        ) from error
    return Position(step=int(head["step"]), version=int(head["version"]))


def copy_tokenizer(source: Path, directory: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _restore_weights(directory: Path, model: PreTrainedModel) -> None:
    """Through ``from_pretrained``, since names on disk may differ from those in memory (fused experts)."""
    saved, info = type(model).from_pretrained(directory, dtype=model.dtype, output_loading_info=True)
    if info["missing_keys"]:
        raise CheckpointError(
            f"checkpoint {directory}: tensor {min(info['missing_keys'])!r} is missing; "
            "it belongs to another model"
        )
    _copy_tensors(model, saved.state_dict(), what=f"checkpoint {directory}")


def _restore_reference(directory: Path, reference: nn.Module) -> None:
    path = directory / "reference.safetensors"
    if not path.is_file():
        raise CheckpointError(
            f"checkpoint {directory}: it was written without a KL reference; resume with kl set to 'none'"
        )
    _copy_tensors(reference, load_file(path), what=str(path))


@torch.no_grad()
def _copy_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor], *, what: str) -> None:
    """In place, so that whoever holds the parameters keeps them; every tensor must be there, and match."""
    own = module.state_dict()
    missing = sorted(set(named_tensors(module)) - set(tensors))
    if missing:
        raise CheckpointError(f"{what}: tensor {missing[0]!r} is missing; it belongs to another model")
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            raise CheckpointError(
                f"{what}: tensor {name!r} does not fit the model; it belongs to another one"
            )
        own[name].copy_(tensor)


def _contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {
        f"{name}:{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return _contiguous(tensors)


def _restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for label, tensor in tensors.items():
        name, _, key = label.rpartition(":")
        parameter = parameters[name]
        optimizer.state[parameter][key] = tensor.to(parameter.device)


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
