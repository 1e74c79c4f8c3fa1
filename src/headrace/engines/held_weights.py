"""The weights an executor computes with: read where they lie, replaced in place.

In: a model and, where adapters are served, their bank. Out: updates land between two passes, whole or not at all
(then WeightSyncError is raised); addresses stay, since graphs know them. On a GPU the copies are only launched, behind
the passes before them: who gave the bytes may have them back after ``wait_until_copied``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from headrace.models.adapter_bank import AdapterBank
from headrace.models.checkpoint_names import Weights
from headrace.models.tensors import blobs_of, copy_on_device, load_into
from headrace.types import TensorBlob, TensorPatch

if TYPE_CHECKING:
    from headrace.kernels.whole_copies import WholeCopies


class HeldWeights:
    def __init__(self, model: PreTrainedModel, bank: AdapterBank | None) -> None:
        self.num_adapters = 0 if bank is None else bank.num_adapters
        """Adapters there is room for beside the model's own weights; 0: none."""
        self._weights = Weights(model)
        self._bank = bank
        self._landing = _Landing()
        self._copied = torch.cuda.Event(blocking=True) if model.device.type == "cuda" else None

    def load(self, updates: Iterable[TensorBlob | TensorPatch]) -> None:
        arrived = list(updates)
        targets = self._weights.called(update.name for update in arrived)
        load_into(targets, arrived, on_device=self._landing.copy)
        self._note_copies()

    def blobs(self, names: Iterable[str]) -> Iterator[TensorBlob]:
        """Under the names of memory or of the checkpoint, whichever these are."""
        return blobs_of(self._weights.called(names))

    def load_adapter(self, adapter: int, updates: Iterable[TensorBlob | TensorPatch]) -> None:
        """As ``load`` for one adapter, numbered from 1; no other is touched."""
        self._adapters().load(adapter, updates)
        self._note_copies()

    def wait_until_copied(self) -> None:
        """Until nothing reads the bytes of the last update any more; may be called from another thread. It takes as
        long as the passes that were launched before it."""
        if self._copied is not None:
            self._copied.synchronize()

    def adapter_blobs(self, adapter: int) -> Iterator[TensorBlob]:
        """As ``blobs`` for one adapter, at the rank there is room for."""
        return blobs_of(self._adapters().tensors(adapter))

    def _note_copies(self) -> None:
        if self._copied is not None:
            self._copied.record()

    def _adapters(self) -> AdapterBank:
        assert self._bank is not None, "an executor without room for adapters is asked about none"
        return self._bank


class _Landing:
    """Copies from GPU memory over weights that never move: in one launch, save for tensors of odd sizes."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._at_once: WholeCopies | None = None

    def copy(self, targets: Mapping[str, torch.Tensor], blobs: Sequence[TensorBlob]) -> None:
        # Triton is needed on a GPU only.
        from headrace.kernels.whole_copies import WholeCopies, can_be_copied_wide

        names = tuple(blob.name for blob in blobs)
        if names != self._names:
            own = [targets[name] for name in names]
            self._names, self._at_once = names, WholeCopies(own) if can_be_copied_wide(own) else None
        sources: list[Any] = [blob.data for blob in blobs]
        if self._at_once is not None and can_be_copied_wide(sources):
            self._at_once.copy_from(sources)
        else:
            copy_on_device(targets, blobs)
