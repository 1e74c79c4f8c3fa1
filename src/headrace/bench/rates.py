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
    on_gpu = device == "cuda"
    source = torch.empty(2**30 if on_gpu else 2**20, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    seconds = device_seconds(copy, 12) if on_gpu else timed(copy, 12, on_gpu=False)[1]
    return 2 * source.numel() / statistics.median(seconds)


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


def device_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """By the GPU's own clock: without what a launch and a wait cost the host, which short calls would feel."""
    seconds = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) * 1e-3)
    return seconds
