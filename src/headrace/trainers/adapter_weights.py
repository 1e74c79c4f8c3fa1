"""An adapter that is trained on one device, and the frozen model it is computed with.

In: a model and a ``LoraSpec``. Out: the surface of ``MasterWeights`` over peft's layers in that model. Masters,
gradients and moments exist in float32 for the adapter only; the model's own weights never change, so that with the
adapter off they are the reference policy.

``ShardedAdapterWeights`` has the same surface over several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.models.lora import LoraSpec
from headrace.trainers.master_weights import MasterWeights, hand_over_to
from headrace.trainers.peft_adapter import (
    AdapterModule,
    PeftAdapter,
    base_name,
    factor_names,
    magnitude_name,
)
from headrace.types import TensorBlob


class AdapterWeights(MasterWeights):
    """``model`` holds the adapter's float32 weights; ``policy`` is the model given, computed with them."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, spec: LoraSpec) -> None:
        self.policy = model
        self.device, self.dtype = model.device, dtype
        self.policy_name = spec.policy
        self._adapter = PeftAdapter(model, dtype, spec)
        self._live = live = self._adapter.tensors
        masters = live if dtype == torch.float32 else {name: _master(p, dtype) for name, p in live.items()}
        self._pairs = [(live[name], masters[name]) for name in live if live[name] is not masters[name]]
        self.model = AdapterModule(masters, self._adapter)

    def off(self) -> AbstractContextManager[None]:
        """While it lasts, the policy is the model as it was given."""
        return self._adapter.off()

    @torch.no_grad()
    def blobs(self) -> Iterator[TensorBlob]:
        """What an engine needs to serve the adapter."""
        row_factors = {}
        for layer in self._adapter.linears if self._adapter.spec.dora else ():
            names = (magnitude_name(layer), base_name(layer), *factor_names(layer))
            row_factors[layer] = self._adapter.row_factor(
                layer, *(self.policy.get_parameter(name) for name in names)
            )
        return self._adapter.blobs(self._live, row_factors)


def _master(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """The parameter's float32 values; it is computed in ``dtype`` itself, and its gradients land here."""
    master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
    parameter.data = parameter.data.to(dtype)
    parameter.register_post_accumulate_grad_hook(hand_over_to(master))
    return master
