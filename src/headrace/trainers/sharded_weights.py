"""Weights spread over ranks (FSDP2): each rank holds, trains and remembers a slice of every tensor.

In: a float32 model, whole on the first rank, of the same shape on the others, where its memory is never
read. Out: the surface of ``MasterWeights`` over it. A layer's weights are gathered when it is computed, in
the dtype it is computed in; gradients are summed over the ranks in float32 onto the slices. A tensor is
never gathered to a rank that does not ask for it, and never two of them at once.

Every slice is a run of rows (dimension 0), and each row lives on exactly one rank. The experts of a mixture may
be divided first: a group of ranks has each expert once, and the copies in several groups are sliced.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from headrace.errors import InvariantError
from headrace.models.tensors import named_tensors, to_blob
from headrace.trainers.blocks import decoder_layers
from headrace.trainers.expert_parallel import divide_experts
from headrace.trainers.head_at_ids import logprobs_at
from headrace.trainers.logprobs import RowTensors, TokenValues, decoder_output, head_values
from headrace.trainers.ranks import Ranks, Rows
from headrace.types import TensorBlob

HELD_SHARE = 0.25
"""Of a GPU's memory: what whole weights and gradients may take between the rows of a step."""


class ShardedWeights:
    """``model`` holds this rank's slices; ``policy`` is the same model, gathered layer by layer."""

    head_master = None
    host_moments: tuple[str, ...] = ()
    host_memory = None

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        *,
        ranks: Ranks,
        expert_ranks: int = 1,
        offload: bool = False,
        hold: bool | None = None,
        source: Mapping[str, torch.Tensor] | None = None,
        num_trained: int | None = None,
    ) -> None:
        """Groups of ``expert_ranks`` neighbours divide the experts of a mixture among themselves. ``offload``
        keeps slices and optimizer state in host memory. ``hold`` keeps weights gathered, and
        gradients whole, from the first row of an update to its last (None: where a GPU has room for
        them). ``source`` is where the first rank takes the weights from (None: the model). ``num_trained`` is how
        many of the weights have gradients (None: all)."""
        assert ranks.device is not None
        self.model = self.policy = model
        self.ranks, self.device, self.dtype = ranks, ranks.device, dtype
        whole = {name: tensor.detach() for name, tensor in (source or named_tensors(model)).items()}
        num_weights = sum(tensor.numel() for tensor in whole.values())
        num_trained = num_weights if num_trained is None else num_trained
        self._hold = _has_room(num_weights, num_trained, ranks.device) if hold is None else hold
        self.held_bytes = whole_bytes(num_weights, num_trained) if self._hold else 0
        """Taken by whole weights and gradients between the rows of an update."""
        self._forward = _Forward(model)
        self._expert_ranks = expert_ranks
        self._root, self._experts = _shard(
            self._forward,
            ranks.size,
            expert_ranks,
            ranks.device,
            _options(dtype, offload=offload and ranks.device.type == "cuda", hold=self._hold),
        )
        self._shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        slices = model.state_dict(keep_vars=True)
        self._slices = {name: slices[name] for name in whole}
        # Names on disk are the model's canonical ones, which every rank knows.
        model._weight_conversions = None
        if len(set(ranks.counts(len(whole)))) > 1:
            raise InvariantError("the ranks do not have the same model: their tensors differ in number")
        self.fill(whole if ranks.is_first else None)

    def values(self, row: RowTensors) -> TokenValues:
        return self._forward(row)

    def logprobs_at(self, row: RowTensors, ids_NA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._forward(row, ids_NA=ids_NA)

    def hidden(self, row: RowTensors) -> torch.Tensor:
        return self._forward(row, with_head=False)

    def begin_row(self, *, is_last: bool) -> None:
        """Before each row of an update: where weights are held, only the last row's backward sums gradients
        over the ranks and lets the weights go."""
        if self._hold:
            self._root.set_requires_gradient_sync(is_last)
            self._root.set_reshard_after_backward(is_last)

    @torch.no_grad()
    def clip_gradients(self, limit: float) -> float:
        """The norm over all ranks; longer gradients are scaled down to ``limit``."""
        gradients = [self.local_of(p.grad) for p in self.model.parameters() if p.grad is not None]
        squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        norm = math.sqrt(self.ranks.totals(float(squares))[0])
        if norm > limit:
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        return norm

    def refresh(self) -> None:
        """Nothing to do: the next gather reads the new slices."""

    def release(self) -> None:
        """Let go of whatever is gathered: the slices are about to change."""
        for module in self._forward.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def local(self, name: str) -> torch.Tensor:
        """This rank's rows of a tensor."""
        return self.local_of(self._slices[name].detach())

    def rows(self, name: str) -> Rows | None:
        """Each rank's rows of a tensor; None: every rank has all of it."""
        if not isinstance(self._slices[name], DTensor):
            return None
        num_rows, size = self._shapes[name][0], self.ranks.size
        if name not in self._experts:
            return _even_rows(num_rows, size)
        parts = _even_rows(num_rows, self._expert_ranks)
        copies = _even_rows(num_rows // self._expert_ranks, size // self._expert_ranks)
        return tuple((first + a, first + b) for a, b in copies for first, _ in parts)

    def own_rows(self, name: str) -> tuple[int, int] | None:
        rows = self.rows(name)
        return None if rows is None else rows[self.ranks.rank]

    def local_of(self, state: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor, or of something the optimizer keeps."""
        return state.to_local() if isinstance(state, DTensor) else state

    def placed_like(self, parameter: torch.Tensor, local: torch.Tensor, key: str) -> torch.Tensor:
        """The reverse of ``local_of``, sliced as the parameter it belongs to."""
        local = local.to(parameter.device)
        if not isinstance(parameter, DTensor) or not local.ndim:
            return local
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def blobs(self) -> Iterator[TensorBlob]:
        """The policy's tensors one after the other on the first rank, which the others help to gather."""
        for name in self._shapes:
            whole = self.gathered(name, self.local(name), to=0, dtype=self.dtype)
            if whole is not None:
                yield to_blob(name, whole)

    def gathered(
        self, name: str, local: torch.Tensor, *, to: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """The whole of something sliced like tensor ``name``, on rank ``to``; cast before it travels."""
        rows = self.rows(name)
        narrow = local.to(self.device, dtype if local.is_floating_point() else None)
        if rows is None:
            return narrow if self.ranks.rank == to else None
        return self.ranks.gather(narrow, rows, to=to)

    @torch.no_grad()
    def fill(self, whole: Mapping[str, torch.Tensor] | None) -> None:
        """Replace all weights by the first rank's, one tensor at a time."""
        self.release()
        for name in self._shapes:
            rows, local = self.rows(name), self.local(name)
            if rows is not None:
                self.ranks.scatter(None if whole is None else whole[name], rows, local)
            elif whole is not None:
                local.copy_(whole[name])
        for buffer in self.model.buffers():
            self.ranks.broadcast(buffer)


class _Forward(nn.Module):
    """All that is computed with the weights, as one call: FSDP gathers around calls."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, row: RowTensors, with_head: bool = True, ids_NA: torch.Tensor | None = None) -> Any:
        if ids_NA is not None:
            return logprobs_at(self.model, row, ids_NA)
        if with_head:
            return head_values(self.model, row)
        # Not a view: FSDP hangs its hooks on what is returned.
        return decoder_output(self.model, row).clone()


def hollow_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A frozen model of the same shape in ``dtype`` whose weights are memory that was never written."""
    memo: dict[int, object] = {}
    for tensor in named_tensors(model).values():
        empty = torch.empty_like(tensor, dtype=dtype if tensor.is_floating_point() else None)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
    return copy.deepcopy(model, memo)


def _options(dtype: torch.dtype, *, offload: bool, hold: bool) -> dict[str, Any]:
    # Inputs keep their dtype: what a layer is given was computed in it, and a router's scores are finer.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mp_policy": precision, "reshard_after_forward": not hold}
    return options | {"offload_policy": CPUOffloadPolicy()} if offload else options


def _shard(
    root: _Forward, size: int, expert_ranks: int, device: torch.device, options: Mapping[str, Any]
) -> tuple[FSDPModule, frozenset[str]]:
    """Returns the root, and the names of the weights that were divided by expert first."""
    experts: frozenset[str] = frozenset()
    if expert_ranks > 1:
        names = ("copies", "experts")
        grid = init_device_mesh(device.type, (size // expert_ranks, expert_ranks), mesh_dim_names=names)
        modules = divide_experts(root.model, grid["experts"].get_group())
        experts = _parameter_names(root.model, modules)
        for module in modules:
            fully_shard(module, mesh=grid["copies"], **options)
    everyone = init_device_mesh(device.type, (size,))
    for layer in decoder_layers(root.model):
        fully_shard(layer, mesh=everyone, **options)
    # What lies outside the layers is needed at both ends of the pass, so it stays in between.
    sharded: FSDPModule = fully_shard(root, mesh=everyone, **{**options, "reshard_after_forward": False})
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided once, by a normaliser counted over all ranks: gradients are only summed.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return sharded, experts


def _parameter_names(model: nn.Module, modules: Sequence[nn.Module]) -> frozenset[str]:
    wanted = {id(parameter) for module in modules for parameter in module.parameters()}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in wanted)


def _has_room(num_weights: int, num_trained: int, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return may_hold(num_weights, num_trained, torch.cuda.get_device_properties(device).total_memory)


def may_hold(num_weights: int, num_trained: int, gpu_bytes: int) -> bool:
    """Whether a GPU of this size has room for whole weights and gradients between the rows of an update."""
    return whole_bytes(num_weights, num_trained) <= HELD_SHARE * gpu_bytes


def whole_bytes(num_weights: int, num_trained: int) -> int:
    """Weights of two bytes, and gradients of four of those that are trained."""
    return 2 * num_weights + 4 * num_trained


def _even_rows(num_rows: int, num_parts: int) -> Rows:
    """As FSDP cuts: every part has the same number of rows, save the last ones."""
    length = math.ceil(num_rows / num_parts)
    return tuple((min(i * length, num_rows), min((i + 1) * length, num_rows)) for i in range(num_parts))
