"""Causal flash attention over the segments of a packed row, some of which continue a shared prefix.

In: queries, keys and values of a row whose prefixes come first, then their continuations, then segments of
their own. Out: what every sequence would give alone. A prefix is computed once for all its continuations, and its
keys and values, which are small beside everything else of a token, are laid before those of each: one kernel
attends all segments, a query to the keys up to its own place counted from the end. In the backward a prefix's
keys and values get the sum of what its readers give them. Both directions are custom ops, so that compiled
layers stay whole.

Legend: T tokens of the row, S segments, R keys as they are read, Hq query heads, Hk key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.kernels.chip import has_kernels
from headrace.models.flash import Segments, flash_backward, flash_forward
from headrace.models.uploads import to_device


@dataclass(frozen=True, slots=True)
class SegmentBounds:
    """Where a row's segments lie. Tensors and not numbers, since compiled code is specialised to numbers."""

    edges: torch.Tensor
    """int32 on the device: S + 1 of the segments; S + 1 of the keys they read. With prefixes also the token of
    each key that is read (R), and the same the other way: T + 1 edges into the places (R) where a token is read."""
    counts: torch.Tensor
    """int64 [5] on the host: S, longest segment, most keys of one, T, R."""


def segment_bounds(
    lengths: Sequence[int] | np.ndarray, parents: Sequence[int] | np.ndarray, *, device: torch.device | str
) -> SegmentBounds:
    """Of segments with these lengths in row order; ``parents`` as in ``PackedRow``."""
    lengths_S, parents_S = np.asarray(lengths, dtype=np.int64), np.asarray(parents, dtype=np.int64)
    shared_S = np.where(parents_S >= 0, lengths_S[parents_S], 0)
    keys_S = lengths_S + shared_S
    num_tokens, num_keys = int(lengths_S.sum()), int(keys_S.sum())
    parts = [np.append(0, np.cumsum(lengths_S)), np.append(0, np.cumsum(keys_S))]
    if num_keys > num_tokens:
        read_R = _tokens_read(lengths_S, parents_S, shared_S)
        parts += [read_R, np.append(0, np.cumsum(np.bincount(read_R, minlength=num_tokens)))]
        parts.append(np.argsort(read_R, kind="stable"))
    counts = [lengths_S.size, int(lengths_S.max(initial=0)), int(keys_S.max(initial=0)), num_tokens, num_keys]
    return SegmentBounds(
        edges=to_device(np.concatenate(parts).astype(np.int32), device),
        counts=torch.tensor(counts),
    )


def _tokens_read(lengths_S: np.ndarray, parents_S: np.ndarray, shared_S: np.ndarray) -> np.ndarray:
    """[R], segment by segment: the tokens of its prefix, then its own."""
    starts_S = np.cumsum(lengths_S) - lengths_S
    runs = np.stack((starts_S[parents_S], shared_S, starts_S, lengths_S), axis=1).reshape(-1, 2)
    firsts, sizes = runs[:, 0], runs[:, 1]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(firsts, sizes) + within


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
    position and the window - 1 before it, in the prefix too."""
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


@dataclass(frozen=True, slots=True)
class _Reading:
    """``SegmentBounds`` taken apart."""

    segments: Segments
    tokens_R: torch.Tensor | None
    """Of the keys that are read; None: every token's once, in order."""
    starts: torch.Tensor | None
    places_R: torch.Tensor | None

    def laid_out(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, Hk, D] as they are read, [R, Hk, D]."""
        if self.tokens_R is None:
            return key, value
        if has_kernels(key.device):
            from headrace.kernels.repeated_rows import lay_out

            return lay_out(key, value, self.tokens_R)
        return key.index_select(0, self.tokens_R), value.index_select(0, self.tokens_R)

    def gathered(self, of_keys: torch.Tensor, of_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The reverse for gradients: each token the sum of all its places."""
        if self.starts is None or self.places_R is None or self.tokens_R is None:
            return of_keys, of_values
        if has_kernels(of_keys.device):
            from headrace.kernels.repeated_rows import row_sums

            return row_sums(of_keys, of_values, self.starts, self.places_R)
        num_tokens = len(self.starts) - 1
        return _added_up(of_keys, self.tokens_R, num_tokens), _added_up(of_values, self.tokens_R, num_tokens)


def _added_up(grad: torch.Tensor, tokens_R: torch.Tensor, num_tokens: int) -> torch.Tensor:
    total = grad.new_zeros((num_tokens, *grad.shape[1:]), dtype=torch.float64)
    return total.index_add_(0, tokens_R, grad.double()).to(grad.dtype)


def _reading(edges: torch.Tensor, counts: torch.Tensor, scale: float, window_left: int) -> _Reading:
    num_segments, longest, most_keys, num_tokens, num_keys = counts.tolist()
    sizes = [num_segments + 1, num_segments + 1]
    repeated = [num_keys, num_tokens + 1, num_keys] if num_keys > num_tokens else []
    queries, keys, *others = edges.split(sizes + repeated)
    segments = Segments(queries, keys, longest, most_keys, scale, window_left)
    return _Reading(segments, *(others or (None, None, None)))


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
    reading = _reading(edges, counts, scale, window_left)
    return flash_forward(query, *reading.laid_out(key, value), reading.segments)


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
    reading = _reading(edges, counts, scale, window_left)
    of_query, of_keys, of_values = flash_backward(
        grad.contiguous(), query, *reading.laid_out(key, value), out, lse, reading.segments
    )
    return of_query, *reading.gathered(of_keys, of_values)


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
