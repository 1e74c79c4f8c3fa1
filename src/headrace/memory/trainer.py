"""What a trainer process holds at the peak of a step: in the head's backward over the longest row.

In: a model's sizes, how it is trained, and the memory that is left for it. Out: bytes by purpose. The arithmetic
that the trainer itself does (how much the head holds, how many layers are recomputed, whether ranks hold whole
weights) is asked of the trainer's own functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headrace.memory.architecture import Architecture, TokenBytes
from headrace.memory.uses import Purpose
from headrace.trainers.blocks import USABLE_SHARE, layers_to_recompute
from headrace.trainers.logprobs import head_bytes, slope_tokens
from headrace.trainers.placement import HOST_MOMENTS, Offload
from headrace.trainers.sharded_weights import may_hold
from headrace.trainers.streamed_adamw import MOMENTS

Bytes = dict[Purpose, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    dtype: torch.dtype
    on_gpu: bool
    compiled: bool
    ranks: int
    offload: Offload
    row_tokens: int
    """Of the longest row."""
    with_reference: bool

    @property
    def spread(self) -> bool:
        """Whether weights lie in slices (FSDP), which also one rank's do when they are in host memory."""
        return self.ranks > 1 or self.offload == "all"


@dataclass(frozen=True, slots=True)
class TrainerBytes:
    device: Bytes
    host: Bytes
    """Beside a GPU; empty where the device is the host."""
    num_recomputed: int
    """Layers that are computed again in the backward."""


def trainer_bytes(model: Architecture, plan: TrainerPlan, *, room: int, device_bytes: int) -> TrainerBytes:
    """Of one rank, whose device has ``room`` for it of ``device_bytes``."""
    kept, moved = _spread(model, plan, device_bytes) if plan.spread else _alone(model, plan)
    head = head_bytes(
        plan.row_tokens,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        dtype=plan.dtype,
        on_gpu=plan.on_gpu,
        own_gradient=not model.num_adapter_weights and (plan.spread or plan.dtype == torch.float32),
    )
    token = model.compiled if plan.on_gpu and plan.compiled else model.eager
    slopes = slope_tokens(plan.row_tokens, vocab_size=model.vocab_size, on_gpu=plan.on_gpu)
    slope_bytes = plan.dtype.itemsize * model.vocab_size
    num_recomputed = 0
    if plan.on_gpu:
        left = USABLE_SHARE * max(room - sum(kept.values()) - head, 0)
        num_recomputed = layers_to_recompute(
            plan.row_tokens,
            num_layers=model.num_layers,
            bytes_per_token=token.layers,
            input_bytes=token.layer_input,
            free_bytes=left - token.outside * plan.row_tokens,
        )
        spare = left - (token.layers + token.outside) * plan.row_tokens
        slopes = min(slopes, max(int(spare // slope_bytes), 0))
    device: Bytes = {
        **kept,
        "activations": _activations(token, plan.row_tokens, model.num_layers, num_recomputed),
        "head and logits": head,
        "slopes of logits": slopes * slope_bytes,
    }
    if plan.on_gpu:
        device["between blocks"] = _between_blocks(device, room)
    return TrainerBytes(device, moved, num_recomputed)


def _alone(model: Architecture, plan: TrainerPlan) -> tuple[Bytes, Bytes]:
    """On the device, and in host memory beside it."""
    num, width = model.num_weights, plan.dtype.itemsize
    if trained := model.num_adapter_weights:
        # The model is frozen in the dtype it is computed in, and without the adapter it is the reference.
        return {
            "weights, computed with": width * (num + trained),
            "weights, float32": 4 * trained,
            "gradients": 4 * trained,
            "moments": 8 * trained,
        }, {}
    held: Bytes = {"weights, float32": 4 * num, "gradients": 4 * num}
    num_on_host = len(HOST_MOMENTS.get(plan.offload, ())) if plan.on_gpu else 0
    if on_device := 4 * (len(MOMENTS) - num_on_host) * num:
        held["moments"] = on_device
    if plan.dtype != torch.float32:
        held["weights, computed with"] = width * num
    if plan.with_reference:
        held["reference"] = width * num
    # An update, in which they pass through the GPU, comes when activations are gone.
    return held, {"moments": 4 * num_on_host * num} if num_on_host else {}


def _spread(model: Architecture, plan: TrainerPlan, device_bytes: int) -> tuple[Bytes, Bytes]:
    """On the device, and in host memory beside it."""
    adapter, width = model.num_adapter_weights, plan.dtype.itemsize
    num, trained = model.num_weights + adapter, adapter or model.num_weights
    own = math.ceil(trained / plan.ranks)
    slices: Bytes = {"weights, float32": 4 * own, "gradients": 4 * own, "moments": 8 * own}
    if adapter:
        # The frozen model, which without the adapter is the reference too.
        slices["weights, computed with"] = width * math.ceil(model.num_weights / plan.ranks)
    elif plan.with_reference:
        slices["reference"] = width * own
    if not plan.on_gpu or may_hold(num, trained, device_bytes):
        # Weights, and gradients until they are summed over the ranks.
        gathered = width * num + 4 * trained
    else:
        # The layer that is computed and the next one, what is of no layer, and gradients on their way.
        of_adapter = math.ceil(adapter / model.num_layers)
        layer, outside = model.num_layer_weights + of_adapter, model.num_outside_weights
        gathered = width * (2 * layer + outside) + 4 * (of_adapter or layer + outside)
    held: Bytes = {"weights, gathered": gathered}
    if plan.offload == "all" and plan.on_gpu:
        return held, slices
    return slices | held, {}


def _between_blocks(device: Bytes, room: int) -> int:
    """What the allocator holds without use: as it comes where there is room; where there is none, it gives back all
    but what is lost among activations."""
    lost, allocated = 1 / USABLE_SHARE - 1, sum(device.values())
    return round(min(max(room - allocated, lost * device["activations"]), lost * allocated))


def _activations(token: TokenBytes, row_tokens: int, num_layers: int, num_recomputed: int) -> int:
    layer = token.layers / num_layers
    kept = token.layers - num_recomputed * (layer - token.layer_input)
    # A layer that is being recomputed has its whole share once more.
    again = token.widest_layer if num_recomputed else 0.0
    return round((kept + again + token.outside) * row_tokens)
