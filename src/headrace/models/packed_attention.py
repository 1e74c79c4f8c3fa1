"""Causal attention inside each sequence of a packed row, through transformers' attention interface.

In: a row of segments laid end to end, [1, T] token ids, and a ``PackedLayout`` of their lengths passed to
the model's forward as the keyword ``packed_layout``, which transformers hands on to every attention
layer. Out: what each sequence would give alone, whether it is one segment or continues a shared prefix.
On a GPU a flash kernel reads the row as it lies. Where it cannot (other devices, float32, soft caps,
sinks) sequences of like length are padded into a few rectangles per row, a
prefix once for each of its continuations; the rectangles depend on the lengths alone, so they are laid
out once per row. Sliding windows, score soft caps and attention sinks are honoured; any other attention
argument that would change the result is refused.

Legend: T tokens of the row, B sequences of a rectangle, L its length, Hq query heads, Hk key-value heads,
D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from headrace.errors import ModelError
from headrace.models.flash import flash_fits
from headrace.models.packed_layout import PackedLayout, Rectangle, build_layout
from headrace.models.shared_prefix import segment_attention

__all__ = ["PACKED_ATTENTION", "PackedLayout", "build_layout", "packed_attention", "use_packed_attention"]

PACKED_ATTENTION = "headrace_packed"

_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make ``model`` compute packed rows; its forward then needs the keyword ``packed_layout``."""
    # Without a mask function of its own: the layout says everything a mask would, and to make one transformers would
    # look at the positions, for which the host has to wait until a GPU has done all that it was given before.
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    model.set_attn_implementation(PACKED_ATTENTION)
    if model.config._attn_implementation != PACKED_ATTENTION:
        raise ModelError(
            f"model: {type(model).__name__} does not use transformers' attention interface, so packed rows "
            "cannot be computed; choose a model that does"
        )


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **unknown: Any,
) -> tuple[torch.Tensor, None]:
    """[1, Hq, T, D] queries and [1, Hk, T, D] keys and values -> [1, T, Hq, D]."""
    _refuse_unknown(module, packed_layout, attention_mask, is_causal, unknown)
    assert packed_layout is not None
    options = _Options(scaling or query.shape[-1] ** -0.5, dropout, sliding_window, softcap, s_aux)
    bounds = packed_layout.bounds
    if bounds is None or not _flash_can(query, value, options):
        return _attend_in_rectangles(query, key, value, packed_layout, options), None
    # Not by a choice of the first, whose gradient would be copied into zeros.
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    output = segment_attention(
        query, key, value, bounds, scale=options.scaling, window=options.sliding_window
    )
    return output[None], None


def _flash_can(query: torch.Tensor, value: torch.Tensor, options: _Options) -> bool:
    plain = options.softcap is None and options.sinks is None and options.dropout == 0.0
    return plain and flash_fits(query, value)


@torch.compiler.disable
def _attend_in_rectangles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_layout: PackedLayout,
    options: _Options,
) -> torch.Tensor:
    """Not compiled: every row has rectangles of its own."""
    if packed_layout.is_one_block:
        return _attend_in_place(query, key, value, packed_layout, options)
    outputs = [
        _attend_rectangle(query, key, value, rectangle, options) for rectangle in packed_layout.rectangles
    ]
    output = outputs[0]
    for other in outputs[1:]:
        output = output + other
    return output.view(1, packed_layout.num_tokens, query.shape[1], value.shape[-1])


@dataclass(frozen=True, slots=True)
class _Options:
    scaling: float
    dropout: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


def _refuse_unknown(
    module: nn.Module,
    layout: PackedLayout | None,
    mask: torch.Tensor | None,
    is_causal: bool | None,
    unknown: dict[str, Any],
) -> None:
    name = type(module).__name__
    if layout is None:
        raise ModelError(
            f"model: {name} was run without packed_layout; pass it to the model's forward, and choose a "
            "model whose layers hand keyword arguments on"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    odd = sorted(k for k, v in unknown.items() if k not in _HARMLESS and v is not None and v is not False)
    if odd or mask is not None or not causal:
        what = ", ".join(odd) or ("a ready-made mask" if mask is not None else "non-causal attention")
        raise ModelError(
            f"model: {name} asks for {what}, which packed attention does not honour; choose another model"
        )


def _attend_in_place(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, options: _Options
) -> torch.Tensor:
    """A row of equal lengths is a rectangle already: views instead of copies."""
    block = layout.rectangles[0]

    def view(x: torch.Tensor) -> torch.Tensor:
        return (
            x.transpose(1, 2)
            .reshape(block.num_sequences, block.length, x.shape[1], x.shape[3])
            .transpose(1, 2)
        )

    output = _attend(view(query), view(key), view(value), options)
    return output.transpose(1, 2).reshape(1, layout.num_tokens, query.shape[1], value.shape[-1])


def _attend_rectangle(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rectangle: Rectangle, options: _Options
) -> torch.Tensor:
    """[T, Hq * D], zero outside the rectangle's tokens."""
    num_cells = rectangle.num_sequences * rectangle.length

    def padded(x: torch.Tensor) -> torch.Tensor:
        rows = x[0].transpose(0, 1).flatten(1)
        if rectangle.repeats:
            blank = rows.new_zeros(num_cells, rows.shape[1])
            flat = blank.index_copy(0, rectangle.cells, rows.index_select(0, rectangle.tokens))
        else:
            flat = _Move.apply(rows, rectangle.tokens, rectangle.cells, num_cells)
        return flat.view(rectangle.num_sequences, rectangle.length, x.shape[1], x.shape[3]).transpose(1, 2)

    # Padding follows the real tokens of its sequence, so causality alone hides it from them.
    output = _attend(padded(query), padded(key), padded(value), options)
    return _Move.apply(
        output.transpose(1, 2).reshape(num_cells, -1),
        rectangle.out_cells,
        rectangle.out_tokens,
        query.shape[2],
    )


class _Move(torch.autograd.Function):
    """Rows ``source`` of the input become rows ``target`` of zeros; the backward moves them back.

    Indices do not repeat, so both directions are copies, where autograd's own would add row by row.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, num_rows: int
    ) -> torch.Tensor:
        ctx.save_for_backward(source, target)
        ctx.num_rows = x.shape[0]
        return x.new_zeros(num_rows, x.shape[1]).index_copy_(0, target, x.index_select(0, source))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        source, target = ctx.saved_tensors
        moved = grad.new_zeros(ctx.num_rows, grad.shape[1])
        return moved.index_copy_(0, source, grad.index_select(0, target)), None, None, None


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options) -> torch.Tensor:
    """Causal attention of [B, Hq, L, D] over [B, Hk, L, D]."""
    length = query.shape[2]
    window = options.sliding_window
    windowed = window is not None and window < length
    if options.softcap is not None or options.sinks is not None:
        return _attend_by_hand(query, key, value, options)
    allowed = _allowed(length, window, query.device) if windowed else None
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=allowed,
        is_causal=not windowed,
        dropout_p=options.dropout,
        scale=options.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _allowed(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [L, L]: the keys a query may see; a window of n keeps the query itself and n - 1 before it."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _attend_by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options
) -> torch.Tensor:
    """Soft caps and sinks change the scores themselves, which the fused kernels do not offer."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = (query @ key.transpose(-1, -2)).float() * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    allowed = _allowed(query.shape[2], options.sliding_window, query.device)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : query.shape[2]]
    weights = F.dropout(weights, options.dropout) if options.dropout else weights
    return weights.to(value.dtype) @ value
