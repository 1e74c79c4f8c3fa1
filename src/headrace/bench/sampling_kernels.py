"""Cases of the kernels that draw tokens from logits, whole or truncated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from headrace.bench.kernel_cases import VOCAB_SIZE, Case, cold_copies
from headrace.kernels import sampling, truncation

SAMPLES = (512, 64, 1)
TRUNCATIONS = {
    "top-k 50": (50, 1.0, False),
    "top-p 0.95": (0, 0.95, False),
    "top-p 0.95 flat": (0, 0.95, True),
}
"""Top-k, top-p, and whether tens of thousands of tokens share the mass, where a trained model has a few."""
LISTED_TOKENS = 1024
"""Ids of a kept set that are listed, as in the engine."""


def cases(device: torch.device) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        yield from (sample(rows, VOCAB_SIZE, dtype, device) for rows in SAMPLES)
    for truncated in TRUNCATIONS:
        yield from (sample_truncated(truncated, rows, VOCAB_SIZE, device) for rows in SAMPLES)


def sample(rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Case:
    num_bytes = rows * vocab_size * dtype.itemsize
    copies = cold_copies(num_bytes, least=2)
    logits = [(torch.randn((rows, vocab_size), device=device) * 3.0).to(dtype) for _ in range(copies)]
    keys = torch.randint(-(2**62), 2**62, (rows,), device=device)
    positions, temperatures = torch.arange(rows, device=device), torch.ones(rows, device=device)
    token_ids = torch.empty(rows, dtype=torch.int32, device=device)
    logprobs = torch.empty(rows, device=device)
    workspace = sampling.sample_workspace(rows, device)

    def launch(logits_RV: torch.Tensor) -> Callable[[], None]:
        return lambda: sampling.sample_rows(
            logits_RV, keys, positions, temperatures, token_ids_out_R=token_ids, logprobs_out_R=logprobs,
            workspace=workspace,
        )  # fmt: skip

    name = f"sample {str(dtype).removeprefix('torch.')} {rows} x {vocab_size}"
    return Case(name, [launch(x) for x in logits], num_bytes, "TB/s")


def sample_truncated(truncated: str, rows: int, vocab_size: int, device: torch.device) -> Case:
    """Counted is one reading of the logits; a truncated draw takes several."""
    top_k, top_p, flat = TRUNCATIONS[truncated]
    num_bytes = rows * vocab_size * 4
    copies = cold_copies(num_bytes, least=2)
    logits = [torch.randn((rows, vocab_size), device=device) * 2.0 for _ in range(copies)]
    for x in logits if not flat else ():
        likely = torch.randint(vocab_size, (rows, 64), device=device)
        x.scatter_add_(1, likely, 12.0 + 3.0 * torch.randn((rows, 64), device=device))
    room = top_k or LISTED_TOKENS
    given = truncation.TruncatedRows(
        sources=torch.arange(rows, device=device),
        seed_keys=torch.randint(-(2**62), 2**62, (rows,), device=device),
        positions=torch.arange(rows, device=device),
        temperatures=torch.ones(rows, device=device),
        top_k=torch.full((rows,), top_k, device=device),
        top_p=torch.full((rows,), top_p, device=device),
        min_p=torch.zeros(rows, device=device),
        list_starts=torch.arange(rows + 1, device=device) * room,
    )
    draws = truncation.new_draws(rows, rows * room, vocab_size, device)
    workspace = sampling.sample_workspace(rows, device)

    def launch(logits_RV: torch.Tensor) -> Callable[[], None]:
        return lambda: sampling.sample_rows_truncated(logits_RV, given, draws, workspace)

    return Case(f"{truncated} {rows} x {vocab_size}", [launch(x) for x in logits], num_bytes, "TB/s")
