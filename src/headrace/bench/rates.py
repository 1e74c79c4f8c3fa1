"""What a device can do, measured in the run whose figures are held against it.

In: a device. Out: bytes a second of a large copy, read and written; operations a second of a large bf16 product of
random matrices. On a CPU both are small, for runs that only have to end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def copy_bandwidth(device: str = "cuda") -> float:
    num_bytes = 2**30 if device == "cuda" else 2**20
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    taken = (_device_time if device == "cuda" else _host_time)(lambda: target.copy_(source), 12)
    return 2 * num_bytes / statistics.median(taken)


def matmul_flops_per_s(device: str = "cuda", repeats: int = 20) -> float:
    size = 8192 if device == "cuda" else 128
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    _, seconds = timed(lambda: left @ right, repeats, on_gpu=device == "cuda")
    return 2.0 * size**3 / statistics.median(seconds)


def timed(
    call: Callable[[], object], repeats: int, *, on_gpu: bool, between: Callable[[], None] = lambda: None
) -> tuple[float, list[float]]:
    """Seconds of a first call, which compiles, and of ``repeats`` more."""
    seconds = []
    for _ in range(repeats + 1):
        between()
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1:]


def _host_time(call: Callable[[], object], repeats: int) -> list[float]:
    return timed(call, repeats, on_gpu=False)[1]


def _device_time(call: Callable[[], object], repeats: int) -> list[float]:
    """Without what a launch and a wait cost the host, which would be felt beside half a millisecond."""
    seconds = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return seconds
