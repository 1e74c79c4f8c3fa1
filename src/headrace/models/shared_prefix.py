"""Causal flash attention over the segments of a packed row, some of which continue a shared prefix.

In: queries, keys and values of a row whose prefixes come first, then their continuations, then segments of
their own. Out: what every sequence would give alone; a prefix is read once for all its continuations. A
continuation attends to itself causally and to its whole prefix; the two parts are merged by their
log-sum-exp. The backward runs both parts with the merged output and log-sum-exp, which makes each of them
its share of the exact gradient. Both directions are custom ops, so that compiled layers stay whole.

Legend: T tokens of the row, S segments, P prefixes, Hq query heads, Hk key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_MAX_HEAD_SIZE = 256


@dataclass(frozen=True, slots=True)
class SegmentBounds:
    """Where a row's segments lie. Tensors and not numbers, since compiled code is specialised to numbers."""

    edges: torch.Tensor
    """int32 on the device: S + 1 of the segments; P + 1 of each prefix's continuations, taken together and
    counted from the first of all; P + 1 of the prefixes."""
    counts: torch.Tensor
    """int64 [6] on the host: S, longest segment, longest run of continuations, longest prefix, tokens of all
    prefixes, tokens of those and all continuations."""
    has_prefixes: bool


def segment_bounds(
    lengths: Sequence[int] | np.ndarray, parents: Sequence[int] | np.ndarray, *, device: torch.device | str
) -> SegmentBounds:
    """Of segments with these lengths in row order; ``parents`` as in ``PackedRow``."""
    lengths_S, parents_S = np.asarray(lengths, dtype=np.int64), np.asarray(parents, dtype=np.int64)
    num_prefixes = int(parents_S.max(initial=-1)) + 1
    prefixes_P = lengths_S[:num_prefixes]
    runs_P = np.zeros_like(prefixes_P)
    np.add.at(runs_P, parents_S[parents_S >= 0], lengths_S[parents_S >= 0])
    parts = (lengths_S, runs_P, prefixes_P)
    edges = np.concatenate([np.append(0, np.cumsum(part)) for part in parts]).astype(np.int32)
    longest = [int(part.max(initial=0)) for part in parts]
    first, last = int(prefixes_P.sum()), int(prefixes_P.sum() + runs_P.sum())
    return SegmentBounds(
        edges=torch.from_numpy(edges).to(device),
        counts=torch.tensor([lengths_S.size, *longest, first, last]),
        has_prefixes=num_prefixes > 0,
    )


def flash_fits(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernels take these tensors."""
    size = query.shape[-1]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= _MAX_HEAD_SIZE
    )


def segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: SegmentBounds,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """[T, Hq, D] queries over [T, Hk, D] keys and values -> [T, Hq, D]. A ``window`` keeps a query's own
    position and the window - 1 before it; it is for rows without shared prefixes."""
    assert window is None or not bounds.has_prefixes
    out, _ = torch.ops.headrace.segment_attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        bounds.edges,
        bounds.counts,
        scale,
        -1 if window is None else window - 1,
    )
    return out


def _split(edges: torch.Tensor, num_segments: int) -> tuple[torch.Tensor, ...]:
    num_prefix_edges = (edges.shape[0] - num_segments - 1) // 2
    return edges.split([num_segments + 1, num_prefix_edges, num_prefix_edges])


@torch.library.custom_op("headrace::segment_attention", mutates_args=())
def _segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    edges: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    window_left: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_segments, longest, longest_run, longest_prefix, first, last = counts.tolist()
    segments, continuations, prefixes = _split(edges, num_segments)
    out, lse = flash_forward(
        query, key, value, segments, segments, longest, longest, True, scale, window_left
    )
    if last > first:
        part, part_lse = flash_forward(
            query[first:last],
            key[:first],
            value[:first],
            continuations,
            prefixes,
            longest_run,
            longest_prefix,
            False,
            scale,
            -1,
        )
        _merge(out[first:last], lse[:, first:last], part, part_lse)
    return out, lse


@_segment_attention.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(query)
    return out, query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("headrace::segment_attention_backward", mutates_args=())
def _segment_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    edges: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    window_left: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_segments, longest, longest_run, longest_prefix, first, last = counts.tolist()
    segments, continuations, prefixes = _split(edges, num_segments)
    grad = grad.contiguous()
    grads = flash_backward(
        grad, query, key, value, out, lse, segments, segments, longest, longest, True, scale, window_left
    )
    if last > first:
        span = slice(first, last)
        parts = flash_backward(
            grad[span],
            query[span],
            key[:first],
            value[:first],
            out[span],
            lse[:, span].contiguous(),
            continuations,
            prefixes,
            longest_run,
            longest_prefix,
            False,
            scale,
            -1,
        )
        for whole, where, part in zip(grads, (span, slice(first), slice(first)), parts, strict=True):
            whole[where] += part
    return grads


@_segment_attention_backward.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, scale, window_left = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.scale, ctx.window_left = scale, window_left


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, key, value, *bounds, out, lse = ctx.saved_tensors
    grads = torch.ops.headrace.segment_attention_backward(
        grad, query, key, value, out, lse, *bounds, ctx.scale, ctx.window_left
    )
    return (*grads, None, None, None, None)


_segment_attention.register_autograd(_backward, setup_context=_keep_for_backward)


def _merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Attention over the keys of both parts, into ``out`` [n, Hq, D] and ``lse`` [Hq, n]."""
    if not out.is_cuda:
        return plain_merge(out, lse, part, part_lse)
    from headrace.kernels.merge import merge

    return merge(out, lse, part, part_lse)


def plain_merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    total = torch.logaddexp(lse, part_lse)
    weight, part_weight = (x.sub(total).exp().T[:, :, None] for x in (lse, part_lse))
    out.copy_(out * weight + part * part_weight)
    lse.copy_(total)


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    longest_query: int,
    longest_key: int,
    causal: bool,
    scale: float,
    window_left: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp [Hq, T]."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        query_bounds,
        key_bounds,
        longest_query,
        longest_key,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=window_left,
        window_size_right=0 if causal else -1,
    )
    return out, lse


def flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    longest_query: int,
    longest_key: int,
    causal: bool,
    scale: float,
    window_left: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        lse,
        query_bounds,
        key_bounds,
        longest_query,
        longest_key,
        0.0,
        causal,
        no_dropout,
        torch.empty(0, device=query.device),
        scale=scale,
        window_size_left=window_left,
        window_size_right=0 if causal else -1,
    )
