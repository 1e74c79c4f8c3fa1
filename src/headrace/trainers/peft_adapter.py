"""An adapter as peft keeps it: which tensors it has, how they are called, and how it is turned off.

In: a model and a ``LoraSpec``. Out: the same model with peft's layers in place, frozen in the dtype it is computed in,
and the adapter's float32 tensors under their names in the model, which alone have gradients.

On disk an adapter is peft's own two files, which ``peft.PeftModel.from_pretrained`` loads. Published it is A and B
of every layer as they are computed with (of fused experts one slice for each), its scaling, and for DoRA the factor
of every output row. Tensors are told apart by name, so they may lie whole on one device or in slices over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from headrace.errors import CheckpointError, TrainingError
from headrace.models.lora import LoraSpec, target_experts, target_linears
from headrace.models.tensors import blobs_of, named_tensors
from headrace.trainers.expert_adapter import (
    compute_beside,
    from_matrix,
    split_factors,
    to_matrix,
    wrappers_of,
)
from headrace.types import TensorBlob

STEM = "adapter_model"
WEIGHTS_FILE = f"{STEM}.safetensors"
_NAME = "default"
_PREFIX = "base_model.model."
Tensors = Mapping[str, torch.Tensor]


class PeftAdapter:
    """Peft's layers in ``model``."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, spec: LoraSpec) -> None:
        import peft

        self.spec, self._model = spec, model
        self.linears = target_linears(model, spec.targets)
        self._expert_weights = target_experts(model, spec.targets, dora=spec.dora)
        _cast(model, dtype)
        # Peft computes alpha / r and takes any number, though it says int.
        alpha: Any = int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha
        self.config = peft.LoraConfig(
            r=spec.rank,
            lora_alpha=alpha,
            target_modules=self.linears,
            target_parameters=self._expert_weights or None,
            use_dora=spec.dora,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            self._peft = peft.get_peft_model(model, self.config)
        self.on_disk = self._names_on_disk()
        """Names in the model by those that peft gives on disk."""
        compute_beside(model, self._expert_weights)
        split_factors(model, self._expert_weights)
        self.tensors = {name: p for name, p in model.named_parameters() if p.requires_grad}
        """As they begin, by name in the model."""

    def _names_on_disk(self) -> dict[str, str]:
        import peft

        given = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        saved = peft.get_peft_model_state_dict(
            self._peft,
            state_dict={_PREFIX + name: tensor for name, tensor in given.items()},
            save_embedding_layers=False,
        )
        by_place = {tensor.data_ptr(): name for name, tensor in given.items()}
        return {label: by_place[tensor.data_ptr()] for label, tensor in saved.items()}

    @contextmanager
    def off(self) -> Iterator[None]:
        """While it lasts, the model computes as it was given."""
        with self._peft.disable_adapter():
            # Peft also freezes what it turns off. Ranks may have gathered it meanwhile when peft undoes that, and the
            # slices, which peft would then not find, would stay frozen.
            for name in self.tensors:
                self._model.get_parameter(name).requires_grad_(True)
            yield

    def row_factor(
        self, name: str, magnitude: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        """What DoRA multiplies output rows of linear layer ``name`` by. Any run of rows can be asked for alone: of A
        all is needed, of the others the same rows."""
        dora = self._model.get_submodule(name).lora_magnitude_vector[_NAME]
        return magnitude / dora.get_weight_norm(weight, b @ a, self.spec.scaling)

    def blobs(self, tensors: Tensors, row_factors: Tensors) -> Iterator[TensorBlob]:
        """What an engine needs to serve the adapter, of its whole ``tensors`` as they are computed with, by name in the
        model; ``row_factors`` by layer, for DoRA."""
        device = next(iter(tensors.values())).device
        sent = {"scaling": torch.tensor([self.spec.scaling], dtype=torch.float32, device=device)}
        for name in self.linears:
            sent[f"{name}.lora_A.weight"], sent[f"{name}.lora_B.weight"] = (
                tensors[part] for part in factor_names(name)
            )
            if name in row_factors:
                sent[f"{name}.row_factor"] = row_factors[name]
        places = {module: place for place, module in self._model.named_modules()}
        for name, wrapper in wrappers_of(self._model, self._expert_weights).items():
            sent[f"{name}.lora_A.weight"], sent[f"{name}.lora_B.weight"] = (
                tensors[part] for part in factor_names(places[wrapper])
            )
        # An engine computes all its adapters together: one that is not finite would spoil the others.
        if not torch.stack(torch._foreach_norm(list(sent.values()))).isfinite().all():
            raise TrainingError("the adapter's weights are not finite; lower trainer.learning_rate")
        return blobs_of(sent)


def factor_names(layer: str) -> tuple[str, str]:
    """A's and B's names in the model."""
    return f"{layer}.lora_A.{_NAME}.weight", f"{layer}.lora_B.{_NAME}.weight"


def magnitude_name(layer: str) -> str:
    return f"{layer}.lora_magnitude_vector.{_NAME}.weight"


def base_name(layer: str) -> str:
    """Of the frozen weight."""
    return f"{layer}.base_layer.weight"


class AdapterModule(nn.Module):
    """The trained tensors under their names in the model, and on disk as peft has them."""

    def __init__(self, masters: Mapping[str, nn.Parameter], adapter: PeftAdapter) -> None:
        super().__init__()
        for name, parameter in masters.items():
            _register(self, name, parameter)
        self.on_disk = adapter.on_disk
        self._config = adapter.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def save_pretrained(self, directory: Path) -> None:
        tensors = {label: self.get_parameter(name).detach() for label, name in self.on_disk.items()}
        save_file(as_on_disk(tensors), directory / WEIGHTS_FILE, metadata={"format": "pt"})
        self.describe(directory)

    def describe(self, directory: Path) -> None:
        """Write what the adapter is, beside its weights."""
        training, self._config.inference_mode = self._config.inference_mode, True
        self._config.save_pretrained(str(directory))
        self._config.inference_mode = training

    def read(self, directory: Path) -> dict[str, torch.Tensor]:
        """What was saved, whole, under the names here; every tensor must be there, and match."""
        tensors = load_file(directory / WEIGHTS_FILE)
        shapes = {label: self.get_parameter(name).shape for label, name in self.on_disk.items()}
        expected = as_on_disk({label: torch.empty(shape, device="meta") for label, shape in shapes.items()})
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in expected.items()}:
            raise CheckpointError(
                f"checkpoint {directory}: its adapter has other layers or another rank; resume with the lora "
                "settings it was trained with"
            )
        return {self.on_disk[label]: _as_trained(label, t, shapes[label]) for label, t in tensors.items()}


def as_on_disk(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Trained tensors by their names on disk, in the form they have there."""
    made = {label: to_matrix(t, is_b=_is_b(label)) if t.ndim == 3 else t for label, t in tensors.items()}
    return {label: tensor.contiguous() for label, tensor in made.items()}


def _as_trained(label: str, saved: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return from_matrix(saved, shape[0], is_b=_is_b(label)) if len(shape) == 3 else saved


def _is_b(label: str) -> bool:
    return label.endswith("lora_B.weight")


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Buffers that are not saved (rotary tables) stay as they are."""
    for tensor in named_tensors(model).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
        tensor.requires_grad_(False)
    model.config.dtype = dtype


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)
