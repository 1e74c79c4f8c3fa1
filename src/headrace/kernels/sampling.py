"""Draws one token a row from logits on the device, with the log-probability of exactly what was drawn.

In: float32 or bfloat16 logits and one setting a row. Out: token ids and float32 log-probabilities, written into
tensors the caller owns; when truncated, also the kept set. The draws are those of the
engine's CPU sampler on the same logits, up to the rounding of near ties: same noise, same order of truncation
(top-k, then top-p of what is left, then min-p), ties to the lower token id. Temperature 0 is greedy, with
log-probability 0 and no truncation.

Nothing reads a tensor on the host, so the launches can be captured in a CUDA graph.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from headrace.errors import ModelError
from headrace.kernels.cut import MAX_LISTED, cut_kernel, list_kernel
from headrace.kernels.draw import MAX_CHUNKS, pick_kernel, scan_kernel
from headrace.kernels.truncation import TruncatedDraws, TruncatedRows

MAX_VOCAB = 2**19
_MIN_CHUNK = 1024
_MAX_ROWS_OF_SCAN = 2


@dataclass(frozen=True, slots=True)
class SampleWorkspace:
    """Where the kernels of a draw leave results for each other."""

    tops: torch.Tensor
    totals: torch.Tensor
    bounds: torch.Tensor
    """float32 [max rows, chunks] each."""
    listed_logits: torch.Tensor
    listed_ids: torch.Tensor
    """float32 and int32 [max rows, listed tokens], for truncation."""
    thresholds: torch.Tensor
    tie_ids: torch.Tensor
    """float32 and int32 [max rows]: a token is kept if its logit is above the threshold, or equal to it and its
    id is at most the tie id."""
    token_keys: torch.Tensor
    """int64 [MAX_VOCAB], the noise key of every token id."""


def sample_workspace(max_rows: int, device: torch.device) -> SampleWorkspace:
    chunks, listed = (max_rows, MAX_CHUNKS), (max_rows, MAX_LISTED)
    return SampleWorkspace(
        tops=torch.empty(chunks, dtype=torch.float32, device=device),
        totals=torch.empty(chunks, dtype=torch.float32, device=device),
        bounds=torch.empty(chunks, dtype=torch.float32, device=device),
        listed_logits=torch.empty(listed, dtype=torch.float32, device=device),
        listed_ids=torch.empty(listed, dtype=torch.int32, device=device),
        thresholds=torch.empty(max_rows, dtype=torch.float32, device=device),
        tie_ids=torch.empty(max_rows, dtype=torch.int32, device=device),
        token_keys=_token_keys(device),
    )


@lru_cache(maxsize=4)
def _token_keys(device: torch.device) -> torch.Tensor:
    """splitmix64 of every token id, in wrapping int64 arithmetic."""

    def mixed(x: torch.Tensor, shift: int, factor: int) -> torch.Tensor:
        return (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor

    x = torch.arange(MAX_VOCAB, device=device) + (0x9E3779B97F4A7C15 - 2**64)
    x = mixed(mixed(x, 30, 0xBF58476D1CE4E5B9 - 2**64), 27, 0x94D049BB133111EB - 2**64)
    return mixed(x, 31, 1)


def sample_rows(
    logits_RV: torch.Tensor,
    seed_keys_R: torch.Tensor,
    positions_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    *,
    token_ids_out_R: torch.Tensor,
    logprobs_out_R: torch.Tensor,
    workspace: SampleWorkspace,
) -> None:
    """``seed_keys_R`` is the int64 view of uint64 keys; positions are integers, temperatures float32."""
    rows = (logits_RV, seed_keys_R, positions_R, temperatures_R)
    _scan(*rows, workspace)
    _pick(*rows, token_ids_out_R, logprobs_out_R, workspace)


def sample_rows_truncated(
    logits_RV: torch.Tensor, rows: TruncatedRows, draws: TruncatedDraws, workspace: SampleWorkspace
) -> None:
    """Rows that turn out to keep everything are drawn as ``sample_rows`` draws them."""
    num_rows, vocab_size = len(rows.sources), logits_RV.shape[1]
    keyed = (rows.seed_keys, rows.positions, rows.temperatures)
    _scan(logits_RV, *keyed, workspace, sources=rows.sources)
    listed_logits = workspace.listed_logits.view(logits_RV.dtype)
    cut_kernel[(num_rows,)](
        logits_RV,
        rows.sources,
        rows.temperatures,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        workspace.tops,
        workspace.totals,
        listed_logits,
        workspace.listed_ids,
        workspace.thresholds,
        workspace.tie_ids,
        vocab_size,
        logits_RV.stride(0),
        listed_logits.stride(0),
        triton.cdiv(vocab_size, _chunk(vocab_size)),
        MAX_CHUNKS=MAX_CHUNKS,
        MAX_LISTED=MAX_LISTED,
        TILE=2048,
        num_warps=8,
    )
    _scan(logits_RV, *keyed, workspace, sources=rows.sources, kept_words=draws.kept_words)
    _pick(logits_RV, *keyed, draws.token_ids, draws.logprobs, workspace, sources=rows.sources, truncated=True)
    num_words = draws.kept_words.shape[1]
    list_kernel[(num_rows,)](
        draws.kept_words,
        rows.list_starts,
        draws.listed,
        draws.counts,
        num_words,
        WORDS=triton.next_power_of_2(num_words),
        num_warps=8,
    )


def _chunk(vocab_size: int) -> int:
    """Tokens a row is read in at a time."""
    if vocab_size > MAX_VOCAB:
        raise ModelError(
            f"the vocabulary has {vocab_size} tokens, and GPU sampling takes {MAX_VOCAB}; use another model."
        )
    return max(_MIN_CHUNK, triton.next_power_of_2(triton.cdiv(vocab_size, MAX_CHUNKS)))


def _scan(
    logits_RV: torch.Tensor,
    seed_keys_R: torch.Tensor,
    positions_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    workspace: SampleWorkspace,
    *,
    sources: torch.Tensor | None = None,
    kept_words: torch.Tensor | None = None,
) -> None:
    """With ``kept_words``, of what the cut in the workspace keeps."""
    num_rows, vocab_size = len(temperatures_R), logits_RV.shape[1]
    chunk = _chunk(vocab_size)
    # Rows that share a program share the token keys; few rows are spread over the chip instead.
    rows = min(_MAX_ROWS_OF_SCAN, triton.next_power_of_2(triton.cdiv(num_rows, 8)))
    scan_kernel[(triton.cdiv(vocab_size, chunk), triton.cdiv(num_rows, rows))](
        logits_RV,
        sources,
        seed_keys_R,
        positions_R,
        temperatures_R,
        workspace.token_keys,
        workspace.thresholds,
        workspace.tie_ids,
        workspace.tops,
        workspace.totals,
        workspace.bounds,
        kept_words,
        num_rows,
        vocab_size,
        logits_RV.stride(0),
        0 if kept_words is None else kept_words.shape[1],
        CUT=kept_words is not None,
        ROWS=rows,
        CHUNK=chunk,
        MAX_CHUNKS=MAX_CHUNKS,
        num_warps=2,
    )


def _pick(
    logits_RV: torch.Tensor,
    seed_keys_R: torch.Tensor,
    positions_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    token_ids_out_R: torch.Tensor,
    logprobs_out_R: torch.Tensor,
    workspace: SampleWorkspace,
    *,
    sources: torch.Tensor | None = None,
    truncated: bool = False,
) -> None:
    vocab_size = logits_RV.shape[1]
    chunk = _chunk(vocab_size)
    pick_kernel[(len(temperatures_R),)](
        logits_RV,
        sources,
        seed_keys_R,
        positions_R,
        temperatures_R,
        workspace.token_keys,
        workspace.thresholds,
        workspace.tie_ids,
        workspace.tops,
        workspace.totals,
        workspace.bounds,
        token_ids_out_R,
        logprobs_out_R,
        vocab_size,
        logits_RV.stride(0),
        triton.cdiv(vocab_size, chunk),
        CUT=truncated,
        CHUNK=chunk,
        MAX_CHUNKS=MAX_CHUNKS,
        num_warps=8,
    )
