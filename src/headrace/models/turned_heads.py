"""Attention whose queries, keys and values go from their joined product to where they are attended in one step.

In: a model whose queries, keys and values are joined (``joined_linear``) and whose rows are packed. Out: the same
model, whose attentions of the usual form, in bfloat16 or float16 and without norms on queries and keys, rotate and lay
out heads by an op of their own. Its backward turns gradients and lays them side by side in one reading and one writing;
to a compiler the gradient of three slices of a product is a sum of three that are mostly zeros. Both round once, as
engines do. For the backward cosines and sines are kept, which all layers share, and not the product. It is for GPUs:
elsewhere torch computes it, in no less time than without it.

An attention of another form stays as it is. One whose products something is put beside or hooked to, or whose row is
not packed, computes as its own class does.

Shape legend: T rows, W width of the product, Q query heads, K key heads and as many of values, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from headrace.kernels.chip import has_kernels
from headrace.kernels.rotation import Rotation, rotated
from headrace.models.flash import flash_fits
from headrace.models.gated_layer import is_hooked, is_untouched
from headrace.models.joined_linear import QUERY_KEY_VALUE, JoinedLinear
from headrace.models.packed_attention import packed_attention
from headrace.models.usual_attention import PLAIN, how_it_attends, rotates_as_usual

_ASKED = {"dropout", "scaling", "sliding_window"}
"""What a flash kernel does, dropout apart, of which there must be none."""


class _Known(NamedTuple):
    """Of an attention that was changed."""

    num_query_heads: int
    asked: Mapping[str, Any]
    """Of the function that attends."""


def turn_heads(model: PreTrainedModel) -> int:
    """Change attentions of the usual form for good, after ``join_linears``; returns how many were changed."""
    decoder = model.get_decoder()
    angles = getattr(getattr(decoder, "rotary_emb", None), "inv_freq", None)
    changed = 0
    for layer in getattr(decoder, "layers", ()):
        attention = getattr(layer, "self_attn", None)
        if attention is None or angles is None or not _fits(attention, 2 * angles.numel()):
            continue
        attending = how_it_attends(attention)
        if (
            attending.form != PLAIN
            or not attending.asked.keys() <= _ASKED
            or attending.asked.get("dropout")
            or not rotates_as_usual(attention)
        ):
            continue
        heads = attention.q_proj.out_features // attention.head_dim
        attention.known_attending = _Known(heads, attending.asked)
        attention.forward = MethodType(turned_forward, attention)
        changed += 1
    return changed


def _fits(attention: Any, rotated_dim: int) -> bool:
    """Whether it has parts as the op and flash kernels take them, which compute what their classes do."""
    parts: list[Any] = [getattr(attention, name, None) for name in (*QUERY_KEY_VALUE, "o_proj")]
    if any(part is None or not is_untouched(part) for part in (attention, *parts)):
        return False
    query, key, value, _ = parts
    dim = getattr(attention, "head_dim", None)
    if dim is None or not _is_joined(attention) or query.shares.layers != [query, key, value]:
        return False
    head = query.weight.new_empty((0, dim), device="meta")
    return (
        dim == rotated_dim
        and query.out_features % dim == key.out_features % dim == 0
        and key.out_features == value.out_features
        and flash_fits(head, head)
    )


def _is_joined(attention: Any) -> bool:
    """Whether nothing is put in the place of its products, or beside them."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    return (
        all(type(part) is JoinedLinear and not is_hooked(part) for part in parts)
        and attention.q_proj.beside is None
    )


def turned_forward(
    attention: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    **asked: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward of an attention that ``turn_heads`` has changed; ``asked`` is what its class hands on, too."""
    is_packed = asked.get("packed_layout") is not None and asked.get("past_key_values") is None
    # In training some drop a part of what they attend to.
    if attention.training or not is_packed or not _is_joined(attention):
        own: tuple[torch.Tensor, torch.Tensor | None] = type(attention).forward(
            attention,
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **asked,
        )
        return own
    product, known = attention.q_proj.product(hidden_states), attention.known_attending
    cos, sin = (part.reshape(-1, part.shape[-1]) for part in position_embeddings)
    heads = torch.ops.headrace.turned_heads(
        product.reshape(-1, product.shape[-1]), cos, sin, known.num_query_heads
    )
    query, key, value = (part.transpose(0, 1)[None] for part in heads)
    made, _ = packed_attention(attention, query, key, value, attention_mask, **known.asked, **asked)
    return attention.o_proj(made.reshape(*hidden_states.shape[:-1], -1)), None


@torch.library.custom_op("headrace::turned_heads", mutates_args=())
def _turned_heads(
    product: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_query_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, Q, D], [T, K, D] and [T, K, D] of [T, W]; cosines and sines, [T, D], are constants to autograd."""
    rotation = Rotation(cos.contiguous(), sin.contiguous())
    if has_kernels(product.device):
        from headrace.kernels.turn import turn_heads as by_kernel

        return by_kernel(product.contiguous(), rotation, num_query_heads)
    num_kv_heads = _num_kv_heads(product, cos, num_query_heads)
    heads = product.unflatten(1, (-1, cos.shape[1]))
    query, key, value = heads.split((num_query_heads, num_kv_heads, num_kv_heads), dim=1)
    return (
        rotated(query, rotation),
        rotated(key, rotation),
        value.clone(memory_format=torch.contiguous_format),
    )


def _num_kv_heads(product: torch.Tensor, cos: torch.Tensor, num_query_heads: int) -> int:
    return (product.shape[1] // cos.shape[1] - num_query_heads) // 2


@_turned_heads.register_fake
def _(
    product: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_query_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_kv_heads = _num_kv_heads(product, cos, num_query_heads)
    query, key, value = (
        product.new_empty((product.shape[0], count, cos.shape[1]))
        for count in (num_query_heads, num_kv_heads, num_kv_heads)
    )
    return query, key, value


@torch.library.custom_op("headrace::turned_gradients", mutates_args=())
def _turned_gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """[T, W], of the product, of those of the three."""
    rotation = Rotation(cos.contiguous(), sin.contiguous())
    if has_kernels(query.device):
        from headrace.kernels.turn import turn_gradients

        return turn_gradients(query.contiguous(), key.contiguous(), value.contiguous(), rotation)
    # Turning back is turning by the same cosines and by sines of the other half, of other sign.
    back = rotation._replace(sin=-sin.roll(sin.shape[1] // 2, dims=1))
    return torch.cat((rotated(query, back), rotated(key, back), value), dim=1).flatten(1)


@_turned_gradients.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    num_heads = query.shape[1] + key.shape[1] + value.shape[1]
    return query.new_empty((query.shape[0], num_heads * query.shape[2]))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, cos, sin, _ = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return torch.ops.headrace.turned_gradients(*grads, *ctx.saved_tensors), None, None, None


_turned_heads.register_autograd(_backward, setup_context=_keep_for_backward)
