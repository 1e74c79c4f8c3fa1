"""Attention for compiled models: one opaque operation a layer, told what to read by the pass in progress.

In: queries, keys and values of a flat pass [1, heads, T, head dim], from transformers' attention interface, or from
``merged_layer``, which leaves their rotation to the operation.
Out: [1, T, heads, head dim]. The operation is registered with a shape-only twin, so that compilers pass it
by without a break; what it does is up to the ``Attending`` that ``attending`` put in place around the forward.
Layers call in order, once each, and are told apart by counting: nothing in a layer's own code depends on
its number, so that one compiled layer serves them all.

Shape legend: T rows of the pass, H query heads, K key-value heads, D key head dim, E value head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from headrace.errors import ModelError
from headrace.kernels.rotation import Rotation

DEVICE = "headrace_device"


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What a layer asks of its attention."""

    scale: float
    window: int | None
    softcap: float | None


class Attending(Protocol):
    """Computes the attention of every layer of one pass."""

    @property
    def num_layers(self) -> int: ...

    def attend(
        self,
        layer: int,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKE: torch.Tensor,
        rotation: Rotation | None,
        options: LayerOptions,
    ) -> torch.Tensor:
        """[T, H, E]; also keeps the keys and values. ``rotation``: what is still to be done to queries and keys."""
        ...


@dataclass(slots=True)
class _Progress:
    attending: Attending | None = None
    next_layer: int = 0


_progress = _Progress()


def register() -> None:
    """Make ``DEVICE`` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(DEVICE, device_attention)
    AttentionMaskInterface.register(DEVICE, _no_mask)


@contextmanager
def attending(passing: Attending) -> Iterator[None]:
    """Around one forward of a model: its layers attend through ``passing``."""
    _progress.attending, _progress.next_layer = passing, 0
    try:
        yield
        if _progress.next_layer != passing.num_layers:
            raise ModelError(
                f"the model attended {_progress.next_layer} times in a pass over {passing.num_layers} layers; "
                "the engine needs exactly one softmax attention a layer, so choose another model."
            )
    finally:
        _progress.attending = None


@torch.library.custom_op("headrace::paged_attention", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    passing, layer = _progress.attending, _progress.next_layer
    if passing is None:
        raise ModelError("the model was called outside a pass of the engine; use the engine's own methods.")
    _progress.next_layer = layer + 1
    options = LayerOptions(scale, window or None, softcap or None)
    query_THD, key_TKD, value_TKE = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    rotation = None if cos is None or sin is None else Rotation(cos[0], sin[0])
    return passing.attend(layer, query_THD, key_TKD, value_TKE, rotation, options).unsqueeze(0)


@_attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


def device_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls once a layer. Masks are ours, so ``attention_mask`` is not read."""
    if s_aux is not None or position_bias is not None:
        raise ModelError(
            f"{type(module).__name__} adds attention sinks or a position bias, which the GPU path lacks; run "
            "the engine on a CPU or choose another model."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.headrace.paged_attention(
        query, key, value, None, None, scale, sliding_window or 0, softcap or 0.0
    ), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Transformers asks for a mask to pass along; the engine has its own."""
    return None
