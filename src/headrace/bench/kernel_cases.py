"""What the timings of single kernels have in common: a case, and how long one launch of it takes.

Shapes are those of Qwen2 0.5B, 1.5B and 7B in bfloat16. A case has launches over enough memory to find none of it in
the chip's cache. Over tensors without memory (device ``meta``) its launches can be compiled instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

from headrace.bench.rates import device_seconds

MODELS = {"0.5B": (14, 2, 64), "1.5B": (12, 2, 128), "7B": (28, 4, 128)}
"""Query heads, key-value heads, head dim."""
VOCAB_SIZE = 151936
_COLD_BYTES = 3e8


class Case(NamedTuple):
    name: str
    launches: list[Callable[[], None]]
    """Each over memory of its own."""
    amount: float
    """Of one launch: bytes, or operations."""
    unit: str
    """Of what is done a second: TB/s or TFLOP/s."""
    of: str = ""
    """Whose kernel; empty: ours."""
    in_graph: bool = True
    """Whether a graph can hold its launches. Where it cannot, they are timed with what the host does for them."""


def cold_copies(num_bytes: float, most: int = 1024, least: int = 1) -> int:
    """How many launches, of so many bytes each, fill the cache several times over."""
    return max(least, min(most, int(_COLD_BYTES // num_bytes)))


def launching(function: Callable[..., object], *given: object) -> Callable[[], None]:
    def launch() -> None:
        function(*given)

    return launch


def seconds(case: Case, repeats: int = 9) -> float:
    """Of one launch: the median of several times all of them, replayed as a graph where one can hold them."""
    case.launches[0]()
    torch.cuda.synchronize()
    launch_all = _replaying(case.launches) if case.in_graph else launching(_each, case.launches)
    launch_all()
    return statistics.median(device_seconds(launch_all, repeats)) / len(case.launches)


def _each(launches: list[Callable[[], None]]) -> None:
    for launch in launches:
        launch()


def _replaying(launches: list[Callable[[], None]]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _each(launches)
    return launching(graph.replay)
