"""The experts that computed each key-value row, on the host and by the row's place.

In: the routes of every pass, as passes land. Out: the routes of a sequence, read through its block table. A block that
is shared brings its routes along, and one that is given to somebody else has them overwritten when its new rows
land, since passes land in the order they were launched.

Shape legend: T rows of a pass, P places (block * block size + row), N rows of a sequence, M mixture-of-experts
layers, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.data.routing import RouterShape, id_dtype, merge_routing, routing_tail
from headrace.types import Routing


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """What some rows of a launched pass were routed to."""

    places: np.ndarray
    """int64 [T]."""
    experts: torch.Tensor
    """[T, M, K] in host memory, there once the pass has landed."""


class RouteTable:
    def __init__(self, shape: RouterShape, num_blocks: int, block_size: int) -> None:
        self.shape, self._block_size = shape, block_size
        self._width = shape.num_layers * shape.top_k
        self._dtype = id_dtype(shape.num_experts)
        # Memory that nobody touches is never taken.
        self._experts_P = np.empty((num_blocks * block_size, self._width), self._dtype)

    def write(self, rows: RoutedRows) -> None:
        self._experts_P[rows.places] = rows.experts.numpy().view(self._dtype).reshape(-1, self._width)

    def read(self, blocks: np.ndarray, start: int, stop: int) -> np.ndarray:
        """[N, M, K] of the rows [start, stop) of the sequence with this block table."""
        positions = np.arange(start, stop)
        places = blocks[positions // self._block_size] * self._block_size + positions % self._block_size
        return self._experts_P[places].reshape(-1, self.shape.num_layers, self.shape.top_k)


def routing_of(
    known: Routing | None,
    table: RouteTable | None,
    blocks: np.ndarray,
    *,
    num_rows: int,
    num_tokens: int,
    start: int = 0,
) -> Routing | None:
    """What is known of a sequence's tokens from ``start`` on, by earlier passes first and then by the table, which
    has its first ``num_rows`` rows."""
    parts, first = [], start
    if known is not None:
        num_known = len(known.recorded)
        parts.append((routing_tail(known, num_known - start), max(num_known - start, 0)))
        # All that is known is taken from there, so nothing before its end need be read.
        first = max(start, num_known - 1) if is_whole(known) else start
    if table is not None:
        stop = min(num_rows, num_tokens - 1)
        recorded = np.arange(first, num_tokens) < stop
        experts = table.read(blocks, first, max(stop, first))
        parts.append((Routing(experts=experts, recorded=recorded), num_tokens - start))
    return merge_routing(parts, num_tokens - start)


def is_whole(routing: Routing | None) -> bool:
    """Whether every token has a row but the last, which never has one."""
    return routing is not None and len(routing.recorded) > 0 and bool(routing.recorded[:-1].all())
