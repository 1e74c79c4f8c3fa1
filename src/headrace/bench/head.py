"""What log-probabilities over kept sets cost in the trainer's head, against the whole vocabulary.

In: a vocabulary, a hidden size, loss tokens and kept sets of random sizes. Out: seconds of a forward and a backward,
and the most memory they took above what was given to them; each the median of several runs after a warm one. The
peer is the other way to compute the same, measured side by side: for each token the products with the rows of the
weight that it kept, and nothing else.

Legend: N loss tokens, C tokens of a chunk, H hidden size, V vocabulary, K ids of the largest set.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.table import Table

from headrace.models.kept_sets import KeptSets, kept_sets
from headrace.trainers.kept_head import KeptHeadLogprobs
from headrace.trainers.logprobs import chunk_tokens, slope_tokens
from headrace.trainers.whole_head import HeadLogprobs
from headrace.types import SamplingMask

SET_SIZES = {"top-p": 24.0, "top-k 64": 64.0, "top-k 1024": 1024.0}
"""Kept ids by case: for top-p a mean around which sizes vary as those of a trained model do, else the same for all."""
GATHERED_BYTES = 2**30
"""Rows of the weight that the peer holds at once."""


def run(
    *, vocab_size: int, hidden_size: int, num_tokens: int, device: str, repeats: int = 5, seed: int = 0
) -> dict[str, Any]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(seed)
    hidden_NH = torch.randn(num_tokens, hidden_size, generator=generator, device=device).to(dtype)
    weight_VH = torch.randn(vocab_size, hidden_size, generator=generator, device=device).to(dtype)
    weight_VH.mul_(hidden_size**-0.5)
    targets = np.random.default_rng(seed).integers(0, vocab_size, num_tokens)
    targets_N = torch.from_numpy(targets).to(device)
    given = hidden_NH, weight_VH, targets_N, torch.ones(num_tokens, device=device)
    cases = [{"case": "whole vocabulary", "mean_kept": None, **_measured(_whole(*given), repeats, device)}]
    for name, mean in SET_SIZES.items():
        kept = random_sets(
            targets, mean, varied=name == "top-p", vocab_size=vocab_size, device=device, seed=seed
        )
        figures = _measured(_kept(*given, kept), repeats, device)
        cases.append({"case": name, "mean_kept": float(kept.counts.mean()), **figures})
        figures = _measured(_gathered(*given, kept), repeats, device)
        cases.append({"case": f"{name}, rows gathered", "mean_kept": float(kept.counts.mean()), **figures})
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_tokens": num_tokens,
        "chunk_tokens": chunk_tokens(weight_VH),
        "repeats": repeats,
        "cases": cases,
    }


def random_sets(
    targets: np.ndarray, mean: float, *, varied: bool, vocab_size: int, device: str, seed: int
) -> KeptSets:
    """Sets that hold the targets. Varied ones are log-normal: most tokens are nearly certain, a few wide open."""
    rng = np.random.default_rng(seed)
    sizes = np.full(len(targets), mean)
    if varied:
        sizes = rng.lognormal(np.log(mean) - 1.125, 1.5, len(targets))
    counts = np.clip(sizes, 1, min(1024, vocab_size)).astype(np.int64)
    rows = []
    for target, count in zip(targets, counts, strict=True):
        # Equal steps from the target on visit no id twice.
        rows.append(np.sort((target + np.arange(count) * (vocab_size // count)) % vocab_size))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return kept_sets(SamplingMask(token_ids=np.concatenate(rows).astype(np.int32), offsets=offsets), device)


Passes = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]
"""A forward, and the backward of what it returned."""


def _whole(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor, ones_N: torch.Tensor
) -> Passes:
    leaves = hidden_NH.clone().requires_grad_(), weight_VH.clone().requires_grad_()
    slopes = slope_tokens(len(targets_N), vocab_size=weight_VH.shape[0], on_gpu=weight_VH.is_cuda)

    def forward() -> torch.Tensor:
        chunk = chunk_tokens(weight_VH)
        return HeadLogprobs.apply(*leaves, None, targets_N, ones_N, None, chunk, None, slopes)[0]

    return forward, lambda logprobs_N: _backward(logprobs_N, leaves)


def _kept(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    ones_N: torch.Tensor,
    kept: KeptSets,
) -> Passes:
    leaves = hidden_NH.clone().requires_grad_(), weight_VH.clone().requires_grad_()

    def forward() -> torch.Tensor:
        chunk = chunk_tokens(weight_VH)
        return KeptHeadLogprobs.apply(*leaves, None, targets_N, ones_N, None, chunk, None, kept)[0]

    return forward, lambda logprobs_N: _backward(logprobs_N, leaves)


def _backward(logprobs_N: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> None:
    logprobs_N.sum().backward()
    for leaf in leaves:
        leaf.grad = None


def _gathered(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    ones_N: torch.Tensor,
    kept: KeptSets,
) -> Passes:
    """The peer. Chunks hold no more rows of the weight than ``GATHERED_BYTES``."""
    width = int(kept.counts.max())
    ids_NK = kept.padded(kept.ids_S.float()).clamp_(min=0).long()
    is_kept_NK = kept.padded(torch.zeros_like(kept.ids_S, dtype=torch.float32)) == 0
    step = max(GATHERED_BYTES // (width * weight_VH.shape[1] * weight_VH.element_size()), 1)

    def logprobs_of(start: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows_CKH = weight_VH[ids_NK[start : start + step]]
        logits_CK = torch.einsum("ckh,ch->ck", rows_CKH, hidden_NH[start : start + step]).float()
        logits_CK = logits_CK.masked_fill(~is_kept_NK[start : start + step], -torch.inf)
        return rows_CKH, logits_CK.log_softmax(-1)

    def forward() -> torch.Tensor:
        out = []
        for start in range(0, len(targets_N), step):
            is_target_CK = ids_NK[start : start + step] == targets_N[start : start + step, None]
            is_target_CK &= is_kept_NK[start : start + step]
            out.append(logprobs_of(start)[1].masked_fill(~is_target_CK, 0.0).sum(-1))
        return torch.cat(out)

    def backward(_: torch.Tensor) -> None:
        grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        grad_NH = torch.empty_like(hidden_NH)
        for start in range(0, len(targets_N), step):
            part = slice(start, start + step)
            rows_CKH, logprobs_CK = logprobs_of(start)
            is_target_CK = (ids_NK[part] == targets_N[part, None]) & is_kept_NK[part]
            grad_CK = (is_target_CK.float() - logprobs_CK.exp()).to(hidden_NH.dtype)
            grad_NH[part] = torch.einsum("ck,ckh->ch", grad_CK, rows_CKH)
            outer_CKH = (grad_CK[:, :, None] * hidden_NH[part, None]).float()
            grad_VH.index_add_(0, ids_NK[part].flatten(), outer_CKH.flatten(0, 1))

    return forward, backward


def _measured(passes: Passes, repeats: int, device: str) -> dict[str, Any]:
    forward, backward = passes
    times: list[tuple[float, float]] = []
    peak = 0
    for attempt in range(repeats + 1):
        gc.collect()
        before = _start(device)
        begun = time.perf_counter()
        logprobs_N = forward()
        _wait(device)
        between = time.perf_counter()
        backward(logprobs_N)
        _wait(device)
        if attempt:
            times.append((between - begun, time.perf_counter() - between))
            peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    return {
        "forward_s": statistics.median(f for f, _ in times),
        "backward_s": statistics.median(b for _, b in times),
        "peak_gib": peak / 2**30 if device == "cuda" else None,
    }


def _start(device: str) -> int:
    """Bytes in use before a run."""
    _wait(device)
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def table(figures: dict[str, Any]) -> Table:
    shown = Table(
        title=f"{figures['num_tokens']} tokens, vocabulary {figures['vocab_size']}, hidden {figures['hidden_size']}, "
        f"{figures['dtype']} on {figures['device']}"
    )
    for column in ("head", "kept ids", "forward ms", "backward ms", "peak GiB"):
        shown.add_column(column, justify="left" if column == "head" else "right")
    for case in figures["cases"]:
        mean, peak = case["mean_kept"], case["peak_gib"]
        shown.add_row(
            case["case"],
            "all" if mean is None else f"{mean:.0f}",
            f"{case['forward_s'] * 1e3:.1f}",
            f"{case['backward_s'] * 1e3:.1f}",
            "" if peak is None else f"{peak:.2f}",
        )
    return shown
