"""Draws one token a row from logits, with the log-probability of exactly what was drawn.

In: float32 logits and one row of settings each. Out: token ids, float32 log-probabilities of the
distribution really sampled from (after temperature and truncation, renormalised), and the kept token
ids of rows that were truncated. Draws are Gumbel-max, written as argmax(p / E) with E standard exponential
noise keyed on (seed, position, token id), so equal requests draw equal tokens in any batch.

Order of truncation: top-k, then top-p of what is left, then min-p. Ties go to the lower token id.

Shape legend: R rows, Q truncated rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.engines.noise import exponential, row_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRows:
    """Settings of the rows to sample, as parallel arrays."""

    temperature: np.ndarray
    """float32 [R]; 0 is greedy."""
    top_k: np.ndarray
    """int64 [R]; 0 keeps every token."""
    top_p: np.ndarray
    min_p: np.ndarray
    """float32 [R] both."""
    seed_key: np.ndarray
    """uint64 [R], ``noise.seed_key`` of each request's seed."""
    position: np.ndarray
    """int64 [R], index of the token within the completion."""


@dataclass(frozen=True, slots=True)
class Drawn:
    token_ids: np.ndarray
    """int64 [R]."""
    logprobs: np.ndarray
    """float32 [R]."""
    kept: dict[int, np.ndarray]
    """int32 kept token ids by row, only for rows that were truncated."""


def sample_plainly(logits_RV: torch.Tensor, noise_RV: torch.Tensor) -> Drawn:
    """``sample`` for rows of temperature 1 that are not truncated, with their noise given."""
    return _draw(torch.log_softmax(logits_RV, dim=-1), noise_RV, {})


def sample(logits_RV: torch.Tensor, rows: SamplerRows) -> Drawn:
    greedy_R = rows.temperature <= 0.0
    temperature_R = torch.from_numpy(np.where(greedy_R, np.float32(1.0), rows.temperature))
    logits_RV = logits_RV / temperature_R.to(logits_RV.device).unsqueeze(1)
    cut_R = (rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)
    kept: dict[int, np.ndarray] = {}
    if cut_R.any():
        logits_RV, kept = _truncate(logits_RV, rows, np.flatnonzero(cut_R & ~greedy_R))
    noise_RV = exponential(row_keys(rows.seed_key, rows.position), logits_RV.shape[1], logits_RV.device)
    noise_RV[torch.from_numpy(greedy_R).to(noise_RV.device)] = 1.0
    drawn = _draw(torch.log_softmax(logits_RV, dim=-1), noise_RV, kept)
    return Drawn(drawn.token_ids, np.where(greedy_R, np.float32(0.0), drawn.logprobs), kept)


def _draw(logprobs_RV: torch.Tensor, noise_RV: torch.Tensor, kept: dict[int, np.ndarray]) -> Drawn:
    drawn_R1 = logprobs_RV.exp().div_(noise_RV).argmax(dim=-1, keepdim=True)
    logprobs_R1 = logprobs_RV.gather(1, drawn_R1)
    return Drawn(drawn_R1.cpu().numpy()[:, 0], logprobs_R1.cpu().numpy()[:, 0], kept)


def _truncate(
    scaled_RV: torch.Tensor, rows: SamplerRows, cut_Q: np.ndarray
) -> tuple[torch.Tensor, dict[int, np.ndarray]]:
    """Cut tokens become -inf; also returns the kept ids of each cut row."""
    device = scaled_RV.device
    index_Q = torch.from_numpy(cut_Q).to(device)
    keep_QV = _kept_tokens(
        scaled_RV[index_Q],
        top_k_Q=torch.from_numpy(rows.top_k[cut_Q]).to(device),
        top_p_Q=torch.from_numpy(rows.top_p[cut_Q]).to(device),
        min_p_Q=torch.from_numpy(rows.min_p[cut_Q]).to(device),
    )
    cut_RV = scaled_RV.clone()
    cut_RV[index_Q] = scaled_RV[index_Q].masked_fill(~keep_QV, float("-inf"))
    keep = keep_QV.cpu().numpy()
    return cut_RV, {int(row): np.flatnonzero(keep[i]).astype(np.int32) for i, row in enumerate(cut_Q)}


def _kept_tokens(
    scaled_QV: torch.Tensor, *, top_k_Q: torch.Tensor, top_p_Q: torch.Tensor, min_p_Q: torch.Tensor
) -> torch.Tensor:
    """bool [Q, V]; the most likely token is always kept."""
    vocab_size = scaled_QV.shape[1]
    sorted_QV, order_QV = torch.sort(scaled_QV, dim=-1, descending=True, stable=True)
    limit_Q1 = torch.where(top_k_Q > 0, top_k_Q.clamp(max=vocab_size), vocab_size).unsqueeze(1)
    rank_V = torch.arange(vocab_size, device=scaled_QV.device)
    keep_QV = rank_V < limit_Q1
    probs_QV = torch.softmax(sorted_QV.masked_fill(~keep_QV, float("-inf")), dim=-1)
    before_QV = probs_QV.cumsum(dim=-1) - probs_QV
    # A row whose top_p is 1 keeps all of it, whatever the rounding of the running sum.
    top_p_Q1 = torch.where(top_p_Q < 1.0, top_p_Q, torch.inf).unsqueeze(1)
    keep_QV &= before_QV < top_p_Q1
    keep_QV &= probs_QV >= min_p_Q.unsqueeze(1) * probs_QV[:, :1]
    keep_QV[:, 0] = True
    return torch.zeros_like(keep_QV).scatter_(1, order_QV, keep_QV)
