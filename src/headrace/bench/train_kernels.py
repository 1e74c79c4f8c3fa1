"""The trainer's GPU kernels beside the compiled functions they stand for: ``python -m headrace.bench.train_kernels``.

Out: two lines a shape, as ``bench.kernels`` writes them. Shapes are those of Qwen2 1.5B and rows of 12,051 tokens.
Both sides of a pair run over the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from headrace.bench.kernels import COLD_BYTES, VOCAB_SIZE, Case, report
from headrace.kernels import add as add_kernel
from headrace.kernels import head_values
from headrace.trainers.head import fused
from headrace.trainers.whole_head import plain_token_values

HEAD_CHUNKS = (1722, 256, 16)
"""Tokens whose logits are held at once: many, some, and few."""
ADDED_SHAPES = ((8960, 1536), (1536, 1536), (256, 1536), (1536,))


def cases(device: torch.device) -> Iterator[Case]:
    for num_tokens in HEAD_CHUNKS:
        yield from token_values(num_tokens, device)
    for shape in ADDED_SHAPES:
        yield from add(shape, device)


def token_values(num_tokens: int, device: torch.device) -> Iterator[Case]:
    """Its bytes are one reading of the logits."""
    num_bytes = num_tokens * VOCAB_SIZE * 4
    copies = max(1, min(16, int(COLD_BYTES // num_bytes)))
    logits = [torch.randn((num_tokens, VOCAB_SIZE), device=device) * 3.0 for _ in range(copies)]
    ids = torch.randint(VOCAB_SIZE, (num_tokens,), device=device)
    temperatures = torch.ones(num_tokens, device=device)
    peer = fused(plain_token_values, device.type)

    def launches(function: Callable[..., object]) -> list[Callable[[], None]]:
        return [_launch(function, x, ids, temperatures, None) for x in logits]

    name = f"head {num_tokens} x {VOCAB_SIZE}"
    yield Case(name, launches(head_values.token_values), num_bytes, "TB/s")
    yield Case(f"{name} compiled", launches(peer), num_bytes, "TB/s")


def add(shape: tuple[int, ...], device: torch.device) -> Iterator[Case]:
    """Its bytes are a float32 sum read and written and a bf16 term read."""
    num_bytes = 10 * math.prod(shape)
    copies = max(2, min(32, int(COLD_BYTES // num_bytes)))
    sums = [torch.randn(shape, device=device) for _ in range(copies)]
    terms = [torch.randn(shape, device=device).bfloat16() for _ in range(copies)]
    peer = torch.compile(_plain_add, dynamic=True)

    def launches(function: Callable[..., object]) -> list[Callable[[], None]]:
        pairs = zip(sums, terms, strict=True)
        return [_launch(function, total.view(-1), term.view(-1)) for total, term in pairs]

    name = f"add {' x '.join(map(str, shape))}"
    yield Case(name, launches(add_kernel.add_to), num_bytes, "TB/s")
    yield Case(f"{name} compiled", launches(peer), num_bytes, "TB/s")


def _plain_add(total: torch.Tensor, term: torch.Tensor) -> None:
    total += term


def _launch(function: Callable[..., object], *arguments: object) -> Callable[[], None]:
    def launch() -> None:
        function(*arguments)

    return launch


if __name__ == "__main__":
    report(cases(torch.device("cuda")))
