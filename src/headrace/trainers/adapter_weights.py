"""An adapter that is trained, and the frozen model it is computed with.

In: a model and a ``LoraSpec``. Out: the same model with peft's layers in place, in the dtype it is computed
in, whose adapter alone has gradients. Masters, gradients and moments exist in float32 for the adapter only;
the model's own weights never change, so that with the adapter off they are the reference policy.

On disk an adapter is peft's own two files, which ``peft.PeftModel.from_pretrained`` loads. Published it is A and B
of every layer as they are computed with (of fused experts one slice for each), its scaling, and for DoRA the factor
of every output row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from headrace.errors import CheckpointError, TrainingError
from headrace.models.lora import LoraSpec, target_experts, target_linears
from headrace.models.tensors import blobs_of, named_tensors
from headrace.trainers.expert_adapter import compute_beside, factors, wrappers_of
from headrace.trainers.master_weights import MasterWeights, hand_over_to
from headrace.types import TensorBlob

WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = "default"
_PREFIX = "base_model.model."


class AdapterWeights(MasterWeights):
    """``model`` holds the adapter's float32 weights; ``policy`` is the model given, computed with them."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, spec: LoraSpec) -> None:
        import peft

        self.policy = model
        self.device, self.dtype = model.device, dtype
        self.policy_name = spec.policy
        self._spec = spec
        self._targets = target_linears(model, spec.targets)
        self._expert_weights = target_experts(model, spec.targets, dora=spec.dora)
        _cast(model, dtype)
        # Peft computes alpha / r and takes any number, though it says int.
        alpha: Any = int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha
        config = peft.LoraConfig(
            r=spec.rank,
            lora_alpha=alpha,
            target_modules=self._targets,
            target_parameters=self._expert_weights or None,
            use_dora=spec.dora,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            self._peft = peft.get_peft_model(model, config)
        compute_beside(model, self._expert_weights)
        live = {name: p for name, p in model.named_parameters() if p.requires_grad}
        masters = live if dtype == torch.float32 else {name: _master(p, dtype) for name, p in live.items()}
        self._pairs = [(live[name], masters[name]) for name in live if live[name] is not masters[name]]
        saved = peft.get_peft_model_state_dict(
            self._peft,
            state_dict={_PREFIX + name: master for name, master in masters.items()},
            save_embedding_layers=False,
        )
        self.model = AdapterModule(masters, saved, config)

    def off(self) -> AbstractContextManager[None]:
        """While it lasts, the policy is the model as it was given."""
        return self._peft.disable_adapter()

    @torch.no_grad()
    def blobs(self) -> Iterator[TensorBlob]:
        """What an engine needs to serve the adapter."""
        device = self.policy.device
        tensors = {"scaling": torch.tensor([self._spec.scaling], dtype=torch.float32, device=device)}
        for name in self._targets:
            layer = self.policy.get_submodule(name)
            a, b = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
            tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
            if self._spec.dora:
                dora = layer.lora_magnitude_vector[_NAME]
                norm = dora.get_weight_norm(layer.base_layer.weight, b @ a, self._spec.scaling)
                tensors[f"{name}.row_factor"] = dora.weight / norm
        for name, wrapper in wrappers_of(self.policy, self._expert_weights).items():
            tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = factors(wrapper)
        # An engine computes all its adapters together: one that is not finite would spoil the others.
        if not torch.stack(torch._foreach_norm(list(tensors.values()))).isfinite().all():
            raise TrainingError("the adapter's weights are not finite; lower trainer.learning_rate")
        return blobs_of(tensors)


class AdapterModule(nn.Module):
    """The trained tensors under their names in the model, and on disk as peft has them."""

    def __init__(
        self, masters: Mapping[str, nn.Parameter], saved: Mapping[str, torch.Tensor], config: Any
    ) -> None:
        """``saved``: the same tensors under the names peft gives them on disk."""
        super().__init__()
        for name, parameter in masters.items():
            _register(self, name, parameter)
        self._saved = dict(saved)
        self._config = config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def save_pretrained(self, directory: Path) -> None:
        tensors = {name: tensor.detach().contiguous() for name, tensor in self._saved.items()}
        save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        training, self._config.inference_mode = self._config.inference_mode, True
        self._config.save_pretrained(str(directory))
        self._config.inference_mode = training

    def read(self, directory: Path) -> dict[str, torch.Tensor]:
        """What ``save_pretrained`` wrote, under the names here; every tensor must be there, and match."""
        tensors = load_file(directory / WEIGHTS_FILE)
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in self._saved.items()}:
            raise CheckpointError(
                f"checkpoint {directory}: its adapter has other layers or another rank; resume with the lora "
                "settings it was trained with"
            )
        by_place = {master.data_ptr(): name for name, master in named_tensors(self).items()}
        return {by_place[self._saved[name].data_ptr()]: tensor for name, tensor in tensors.items()}


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Buffers that are not saved (rotary tables) stay as they are."""
    for tensor in named_tensors(model).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
        tensor.requires_grad_(False)
    model.config.dtype = dtype


def _master(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """The parameter's float32 values; it is computed in ``dtype`` itself, and its gradients land here."""
    master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
    parameter.data = parameter.data.to(dtype)
    parameter.register_post_accumulate_grad_hook(hand_over_to(master))
    return master


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)
