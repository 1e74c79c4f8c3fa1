"""Where a trainer's weights live: on one device, or in slices over ranks; all of them, or an adapter's.

In: a model, whole on the first rank. Out: the weights that are trained, and a frozen copy of them where the loss
needs one. The model is checked before it is given away, while one rank still has all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from transformers import PreTrainedModel

from headrace.errors import ConfigError
from headrace.kernels.chip import has_kernels
from headrace.models.float_residual import keep_float_residual
from headrace.models.gated_layer import join_gates
from headrace.models.joined_linear import QUERY_KEY_VALUE, join_linears
from headrace.models.lora import LoraSpec
from headrace.models.packed_attention import use_packed_attention
from headrace.models.tensors import named_tensors
from headrace.models.turned_heads import turn_heads
from headrace.trainers.adapter_weights import AdapterWeights
from headrace.trainers.forward_check import check_forward
from headrace.trainers.host_memory import HostMemory
from headrace.trainers.master_weights import MasterWeights, compute_copy
from headrace.trainers.ranks import Ranks
from headrace.trainers.sharded_adapter import ShardedAdapterWeights
from headrace.trainers.sharded_weights import ShardedWeights, hollow_copy
from headrace.trainers.streamed_adamw import MOMENTS

Weights = MasterWeights | ShardedWeights
Adapters = AdapterWeights | ShardedAdapterWeights
"""Weights that are an adapter's alone."""
Offload = Literal["none", "first_moments", "moments", "all"]
HOST_MOMENTS: Mapping[Offload, tuple[str, ...]] = {"first_moments": MOMENTS[:1], "moments": MOMENTS}
"""The moments that lie in host memory by themselves; with ``all`` they do beside the weights."""


def place_weights(
    model: PreTrainedModel,
    dtype: torch.dtype,
    lora: LoraSpec | None,
    with_reference: bool,
    *,
    ranks: Ranks,
    expert_ranks: int,
    offload: Offload,
) -> tuple[Weights, Weights | None]:
    """Ranks without a device of their own are one process that trains alone. With ``lora`` no copy is needed: the
    policy without its adapter is the reference."""
    if offload in HOST_MOMENTS and (lora is not None or ranks.device is not None):
        raise ConfigError(
            f"trainer.offload: {offload} alone are kept in host memory for a whole model on one rank: set it to all, "
            "or trainer.ranks = 1 and lora.rank = 0"
        )
    in_host = offload == "all"
    if in_host and ranks.device is None:
        raise ConfigError(
            "trainer.offload: all needs a rank with a device of its own, which a run makes even of a single one: give "
            "the trainer such ranks, or set it to moments or first_moments"
        )
    keep_float_residual(model)
    if lora is not None and ranks.device is None:
        adapter = AdapterWeights(model.eval(), dtype, lora)
        check_forward(adapter.policy)
        return adapter, None
    model = model.eval() if lora is not None else model.to(torch.float32).eval()
    if ranks.is_first:
        check_forward(model)
    else:
        use_packed_attention(model)
    if lora is not None:
        return ShardedAdapterWeights(
            model, dtype, lora, ranks=ranks, expert_ranks=expert_ranks, offload=in_host
        ), None
    if ranks.device is None:
        masters, reference = _on_one_device(model, dtype, with_reference)
        if offload in HOST_MOMENTS:
            masters.host_moments, masters.host_memory = HOST_MOMENTS[offload], HostMemory()
        return masters, reference
    slices = None
    if with_reference:
        slices = ShardedWeights(
            hollow_copy(model, dtype),
            dtype,
            ranks=ranks,
            expert_ranks=expert_ranks,
            offload=in_host,
            source=named_tensors(model),
        )
    weights = ShardedWeights(model, dtype, ranks=ranks, expert_ranks=expert_ranks, offload=in_host)
    return weights, slices


def _on_one_device(
    model: PreTrainedModel, dtype: torch.dtype, with_reference: bool
) -> tuple[MasterWeights, MasterWeights | None]:
    masters = MasterWeights(model, dtype)
    reference = MasterWeights(compute_copy(masters.policy, dtype), dtype) if with_reference else None
    if masters.policy is not model:
        # After the copy, which would tear them apart; both alike, so that they differ by their weights alone.
        for weights in (masters, reference):
            if weights is not None:
                join_linears(weights.policy, (QUERY_KEY_VALUE,))
                join_gates(weights.policy)
                if has_kernels(weights.device):
                    turn_heads(weights.policy)
        check_forward(masters.policy)
    return masters, reference
