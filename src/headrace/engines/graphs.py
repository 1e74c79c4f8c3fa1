"""CUDA graphs of an engine's passes, in one memory.

In: a computation over tensors that stay where they are. Out: a graph that computes it anew with whatever they hold
by then. Passes follow one another and leave their results in memory of their own, so all graphs use the same memory
for the rest: captured largest first, as at the start, the smaller ones need no more of it. What is captured later
waits for the whole device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def many_captures() -> Iterator[None]:
    """Around captures one after the other. Torch collects garbage before each; what is there when they begin need not
    be looked through every time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Graphs:
    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """``compute`` is called twice, the first time to compile what it needs."""
        compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # An update may be read by another thread meanwhile, on a stream of its own.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        self._pool = graph.pool()
        return graph
