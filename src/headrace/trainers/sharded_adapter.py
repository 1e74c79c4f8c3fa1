"""An adapter that is trained over ranks (FSDP2), with the frozen model it belongs to in slices beside it.

In: a model, whole on the first rank, of the same shape on the others. Out: the surface of ``AdapterWeights``, of which
each rank holds and trains its slices. The model's own slices lie in the dtype they are computed in and never
change; with the adapter off they are the reference policy. Nothing but the adapter's tensors is gathered to be
published or saved, and what is published or saved is what one device would.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.models.lora import LoraSpec
from headrace.trainers.peft_adapter import (
    STEM,
    AdapterModule,
    PeftAdapter,
    as_on_disk,
    base_name,
    factor_names,
    magnitude_name,
)
from headrace.trainers.ranks import Ranks
from headrace.trainers.shard_files import Entry, Write, write_files
from headrace.trainers.sharded_weights import ShardedWeights
from headrace.types import TensorBlob


class ShardedAdapterWeights(ShardedWeights):
    """``model`` holds this rank's float32 slices of the adapter; ``policy`` is the model given, gathered layer by
    layer together with it."""

    model: AdapterModule

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        spec: LoraSpec,
        *,
        ranks: Ranks,
        expert_ranks: int = 1,
        offload: bool = False,
        hold: bool | None = None,
    ) -> None:
        self.policy_name = spec.policy
        self._adapter = adapter = PeftAdapter(model, dtype, spec)
        super().__init__(
            model,
            dtype,
            ranks=ranks,
            expert_ranks=expert_ranks,
            offload=offload,
            hold=hold,
            num_trained=sum(tensor.numel() for tensor in adapter.tensors.values()),
        )
        self._frozen = {name: self._slices[name] for name in self._slices if name not in adapter.tensors}
        # From here on the adapter's tensors are all there is to fill, keep and send.
        self._shapes = {name: self._shapes[name] for name in adapter.tensors}
        self._slices = {name: self._slices[name] for name in adapter.tensors}
        adapter.tensors = masters = {name: self._parameter(name) for name in adapter.tensors}
        self.model = AdapterModule(masters, adapter)

    def _parameter(self, name: str) -> nn.Parameter:
        slices = self._slices[name]
        assert isinstance(slices, nn.Parameter)
        return slices

    def off(self) -> AbstractContextManager[None]:
        """While it lasts, the policy is the model as it was given."""
        return self._adapter.off()

    @torch.no_grad()
    def blobs(self) -> Iterator[TensorBlob]:
        """What an engine needs to serve the adapter, on the first rank; the others help to gather it."""
        row_factors = self._row_factors() if self._adapter.spec.dora else {}
        whole = {}
        for name in self.names():
            gathered = self.gathered(name, self.local(name), to=0, dtype=self.dtype)
            if gathered is not None:
                whole[name] = gathered
        return self._adapter.blobs(whole, row_factors) if self.ranks.is_first else iter(())

    def _row_factors(self) -> dict[str, torch.Tensor]:
        """Each rank has the same rows of the frozen weight, of B and of the magnitudes, and computes those."""
        found = {}
        for layer in self._adapter.linears:
            name_a, name_b = factor_names(layer)
            a = self.ranks.join(self.local(name_a).to(self.dtype)).to(self.device)
            own = self._adapter.row_factor(
                layer,
                self._computed(self.local(magnitude_name(layer))),
                self._computed(self.local_of(self._frozen[base_name(layer)].detach())),
                a,
                self._computed(self.local(name_b)),
            )
            whole = self.gathered(magnitude_name(layer), own, to=0)
            if whole is not None:
                found[layer] = whole
        return found

    def _computed(self, local: torch.Tensor) -> torch.Tensor:
        return local.to(self.device, self.dtype)


def write_adapter(directory: Path, weights: ShardedAdapterWeights, write: Write) -> None:
    """Weights and configuration as peft has them: all weights in one file, which the first rank writes."""
    entries = [Entry(label, name, weights.local(name)) for label, name in weights.model.on_disk.items()]
    write_files(directory, STEM, weights, entries, write, convert=as_on_disk, file_bytes=sys.maxsize)
    write(lambda: weights.model.describe(directory) if weights.ranks.is_first else None)
