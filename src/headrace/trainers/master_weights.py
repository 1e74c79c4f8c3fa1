"""Float32 weights that are trained, and the copy of them that is computed with and published.

In: a float32 model. Out: the same model computed with in another dtype: a copy whose modules are its own,
whose parameters are refreshed in place after every update, and whose gradients land in the float32
model's. They are added up there in float32: a step has many rows, and in bf16 the later ones would be
rounded away against the sum of those before. Buffers that are not saved (rotary tables) stay float32.

``ShardedWeights`` has the same surface over several ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.errors import InvariantError
from headrace.kernels.chip import has_kernels
from headrace.models.joined_linear import joined_groups
from headrace.models.tensors import named_tensors, to_blobs
from headrace.trainers.head_at_ids import logprobs_at
from headrace.trainers.host_memory import HostMemory
from headrace.trainers.logprobs import RowTensors, TokenValues, decoder_output, head_values
from headrace.trainers.ranks import ALONE
from headrace.types import TensorBlob


def compute_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy with its own weights in ``dtype``, without gradients. Tied weights stay tied; joined layers cannot be
    copied, since each weight is given memory of its own."""
    if joined_groups(model):
        raise InvariantError(
            "a model whose layers are joined cannot be copied: copy it first, then join them"
        )
    memo: dict[int, object] = {}
    for tensor in named_tensors(model).values():
        narrow = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(narrow, requires_grad=False) if is_parameter else narrow
    twin = copy.deepcopy(model, memo)
    twin.config.dtype = dtype
    return twin


class MasterWeights:
    """``model`` holds the weights; ``policy`` is what is computed, the model itself in its own dtype."""

    ranks = ALONE
    held_bytes = 0
    head_master: torch.Tensor | None = None
    """The float32 weight of the output head, whose gradient the head adds to by itself; None: the policy's head
    is the one that is trained, or none is."""
    host_moments: tuple[str, ...] = ()
    """Those of the optimizer's moments that lie in host memory."""
    host_memory: HostMemory | None = None
    """Where they are put, of weights on a GPU; None: there are none."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.model = self.policy = model
        self.device, self.dtype = model.device, dtype
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._blobs: list[TensorBlob] | None = None
        if dtype == model.dtype:
            return
        self.policy = compute_copy(model, dtype)
        mirrors, masters = named_tensors(self.policy), named_tensors(model)
        self._pairs = [(mirrors[name], masters[name]) for name in masters]
        for mirror, master in self._pairs:
            if master.requires_grad:
                mirror.requires_grad_(True)
                mirror.register_post_accumulate_grad_hook(hand_over_to(master))
        head = model.get_output_embeddings()
        self.head_master = None if head is None else head.weight

    def values(self, row: RowTensors) -> TokenValues:
        return head_values(self.policy, row, head_master=self.head_master)

    def logprobs_at(self, row: RowTensors, ids_NA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logprobs_at(self.policy, row, ids_NA, head_master=self.head_master)

    def hidden(self, row: RowTensors) -> torch.Tensor:
        return decoder_output(self.policy, row)

    def begin_row(self, *, is_last: bool) -> None:
        """Nothing to do: gradients are added up where they are."""

    def clip_gradients(self, limit: float) -> float:
        """The norm before longer gradients are scaled down to ``limit``."""
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))

    def blobs(self) -> Iterator[TensorBlob]:
        """The same ones every time, since the policy's tensors stay where they are: naming hundreds of them anew
        takes longer than a GPU takes to copy a small model. Not where a tensor is no dense memory: of that a blob
        is a copy."""
        if self._blobs is not None:
            return iter(self._blobs)
        blobs = list(to_blobs(self.policy))
        if all(tensor.is_contiguous() for tensor in named_tensors(self.policy).values()):
            self._blobs = blobs
        return iter(blobs)

    def release(self) -> None:
        """Nothing to do: there is one copy of what is computed with."""

    def names(self) -> list[str]:
        return list(named_tensors(self.model))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.local(name).shape)

    def local(self, name: str) -> torch.Tensor:
        """This rank's part of a tensor, which here is all of it."""
        return named_tensors(self.model)[name].detach()

    def own_rows(self, name: str) -> None:
        """The rows this rank has of a tensor; None: all."""

    def gathered(self, name: str, local: torch.Tensor, *, to: int) -> torch.Tensor:
        return local

    def local_of(self, state: torch.Tensor) -> torch.Tensor:
        """This rank's part of something the optimizer keeps."""
        return state

    def placed_like(self, parameter: torch.Tensor, local: torch.Tensor, key: str) -> torch.Tensor:
        """The reverse of ``local_of``, where the optimizer keeps what it calls ``key``."""
        if key in self.host_moments and parameter.is_cuda:
            assert self.host_memory is not None
            return self.host_memory.copy_of(local)
        return local if key in self.host_moments else local.to(parameter.device)

    @torch.no_grad()
    def fill(self, whole: Mapping[str, torch.Tensor] | None) -> None:
        """Replace the weights, in place, so that whoever holds the parameters keeps them."""
        assert whole is not None
        for name, tensor in named_tensors(self.model).items():
            tensor.copy_(whole[name])
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the policy up to the model, in place: its addresses may be known elsewhere."""
        if self._pairs:
            mirrors, masters = zip(*self._pairs, strict=True)
            torch._foreach_copy_(mirrors, masters)


def _add(total: torch.Tensor, term: torch.Tensor) -> None:
    if has_kernels(total.device):
        from headrace.kernels.add import add_to

        add_to(total, term)
    else:
        total += term


def hand_over_to(master: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """A hook that adds a parameter's gradient to the master's and lets go of it."""

    def hand_over(mirror: torch.Tensor) -> None:
        if mirror.grad is None:
            # A head that has added its gradient itself.
            return
        if master.grad is None:
            master.grad = mirror.grad.float()
        else:
            _add(master.grad, mirror.grad)
        mirror.grad = None

    return hand_over
