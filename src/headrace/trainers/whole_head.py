"""Log-probabilities over the whole vocabulary and their gradients, a chunk of tokens at a time.

In: hidden states, the head's weight and the ids to be valued. Out: float32 log-probabilities with gradient, and
entropies without. The slope of a log-probability over the logits does not depend on what the loss makes of it:
the backward is the slopes times one factor a token, which is put to the hidden states instead of the logits. So the
forward keeps the slopes of the last tokens in the model's dtype, as many as it is told, and of the others one
normaliser each, from which the backward makes theirs by computing the logits again. What was kept lies together, so
that its two gradient products are one each: chunk by chunk the first has too few rows to fill a GPU, and the second
reads and writes the whole weight's gradient for every chunk.

Legend: N tokens, C tokens of a chunk, K tokens whose slopes are kept, A ids at each, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headrace.kernels.chip import has_kernels
from headrace.trainers.head import HeadGradients, chunks, fused, uncapped_logits


class HeadLogprobs(torch.autograd.Function):
    """log softmax(softcap(hidden @ weight.T + bias) / temperature) at the ids, chunk by chunk: one id for each token
    [N], or several [N, A]. Values and their gradient have the shape of the ids. Of the last ``kept_tokens`` the forward
    keeps the slopes, where there is one id."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        ids: torch.Tensor,
        temperatures_N: torch.Tensor,
        softcap: float | None,
        chunk_tokens: int,
        master_VH: torch.Tensor | None,
        kept_tokens: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = hidden_NH.shape[0]
        logprobs = hidden_NH.new_empty(ids.shape, dtype=torch.float32)
        entropy_N = hidden_NH.new_empty(num_tokens, dtype=torch.float32)
        normaliser_N = torch.empty_like(entropy_N)
        parts = chunks(num_tokens, chunk_tokens)
        first_kept = _first_kept(parts, num_tokens, kept_tokens if ids.dim() == 1 else 0)
        kept_KV = hidden_NH.new_empty((num_tokens - first_kept, weight_VH.shape[0]))
        for chunk in parts:
            logits_CV = uncapped_logits(hidden_NH[chunk], weight_VH, bias_V)
            at = ids[chunk], temperatures_N[chunk]
            normaliser_N[chunk], logprobs[chunk], entropy_N[chunk] = _token_values(logits_CV, *at, softcap)
            if chunk.start >= first_kept:
                there = slice(chunk.start - first_kept, chunk.stop - first_kept)
                _keep_slopes(kept_KV[there], logits_CV, *at, normaliser_N[chunk], softcap)
            # Gone before the next chunk's are made.
            del logits_CV
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids, temperatures_N, normaliser_N)
        ctx.softcap, ctx.chunk_tokens, ctx.master_VH = softcap, chunk_tokens, master_VH
        ctx.first_kept, ctx.kept_KV = first_kept, kept_KV
        ctx.mark_non_differentiable(entropy_N)
        return logprobs, entropy_N

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, ids, temperatures_N, normaliser_N = ctx.saved_tensors
        gradients = HeadGradients(ctx.needs_input_grad, hidden_NH, weight_VH, bias_V, ctx.master_VH)
        has_one_id, num_tokens = ids.dim() == 1, hidden_NH.shape[0]
        # What was kept is used up first, so that as little as possible stands beside it. A second backward makes it
        # anew.
        first_kept, kept_KV = ctx.first_kept, ctx.kept_KV
        ctx.first_kept, ctx.kept_KV = num_tokens, None
        if first_kept < num_tokens:
            of_kept = slice(first_kept, num_tokens)
            gradients.add(of_kept, kept_KV, grad[of_kept])
        del kept_KV
        for chunk in chunks(num_tokens, ctx.chunk_tokens):
            if chunk.start >= first_kept:
                break
            slopes_CV = _slopes(
                uncapped_logits(hidden_NH[chunk], weight_VH, bias_V), ids[chunk], temperatures_N[chunk],
                normaliser_N[chunk], ctx.softcap, hidden_NH.dtype, None if has_one_id else grad[chunk],
            )  # fmt: skip
            gradients.add(chunk, slopes_CV, grad[chunk] if has_one_id else None)
            del slopes_CV
        return *gradients.results(), None, None, None, None, None, None


def _first_kept(parts: Sequence[slice], num_tokens: int, kept_tokens: int) -> int:
    """The first token of the first chunk that is kept whole."""
    starts = (part.start for part in parts if part.start >= num_tokens - kept_tokens)
    return next(starts, num_tokens)


def _keep_slopes(
    there_CV: torch.Tensor,
    logits_CV: torch.Tensor,
    ids_C: torch.Tensor,
    temperatures_C: torch.Tensor,
    normaliser_C: torch.Tensor,
    softcap: float | None,
) -> None:
    """Written where they are kept, in the same pass over the logits that makes them."""
    write = fused(_write_slopes, logits_CV.device.type)
    write(there_CV, logits_CV, ids_C, temperatures_C, normaliser_C, torch.ones_like(temperatures_C), softcap)


def _write_slopes(
    there_CV: torch.Tensor,
    logits_CV: torch.Tensor,
    ids_C: torch.Tensor,
    temperatures_C: torch.Tensor,
    normaliser_C: torch.Tensor,
    grad_C: torch.Tensor,
    softcap: float | None,
) -> None:
    there_CV.copy_(
        _logit_gradient(logits_CV, ids_C, temperatures_C, normaliser_C, grad_C, softcap, there_CV.dtype)
    )


def _slopes(
    logits_CV: torch.Tensor,
    ids: torch.Tensor,
    temperatures_C: torch.Tensor,
    normaliser_C: torch.Tensor,
    softcap: float | None,
    dtype: torch.dtype,
    grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of the log-probabilities over the uncapped logits; of several ids summed, each times its ``grad``."""
    grad = torch.ones_like(temperatures_C) if grad is None else grad
    of_logits = fused(_logit_gradient, logits_CV.device.type)
    return of_logits(logits_CV, ids, temperatures_C, normaliser_C, grad, softcap, dtype)


def _token_values(
    logits_CV: torch.Tensor, ids: torch.Tensor, temperatures_C: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normaliser, log-probabilities at the ids and entropy of every token."""
    if not has_kernels(logits_CV.device):
        return plain_token_values(logits_CV, ids, temperatures_C, softcap)
    from headrace.kernels.head_values import token_values

    return token_values(logits_CV, ids, temperatures_C, softcap)


def plain_token_values(
    logits_CV: torch.Tensor, ids: torch.Tensor, temperatures_C: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if softcap is not None:
        logits_CV = torch.tanh(logits_CV / softcap) * softcap
    logits_CV = logits_CV / temperatures_C[:, None]
    normaliser_C = logits_CV.logsumexp(-1)
    logprobs_CA = logits_CV.gather(1, _columns(ids)) - normaliser_C[:, None]
    probs_CV = (logits_CV - normaliser_C[:, None]).exp_()
    return normaliser_C, logprobs_CA.view(ids.shape), normaliser_C - probs_CV.mul_(logits_CV).sum(-1)


def _logit_gradient(
    logits_CV: torch.Tensor,
    ids: torch.Tensor,
    temperatures_C: torch.Tensor,
    normaliser_C: torch.Tensor,
    grad: torch.Tensor,
    softcap: float | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient of the uncapped logits in ``dtype``; an id that is given twice counts twice."""
    temperature_C1, ids_CA = temperatures_C[:, None], _columns(ids)
    grad_CA = _columns(grad) / temperature_C1
    slope_CV = None
    if softcap is not None:
        tanh_CV = torch.tanh(logits_CV / softcap)
        logits_CV, slope_CV = tanh_CV * softcap, 1 - tanh_CV.square()
    probs_CV = (logits_CV / temperature_C1 - normaliser_C[:, None]).exp_()
    grad_CV = probs_CV.mul_(-grad_CA.sum(-1, keepdim=True))
    if torch.compiler.is_compiling() and ids.dim() == 1:
        # The same sum where the scatter would be a second pass over the chunk.
        ids_V = torch.arange(grad_CV.shape[1], device=grad_CV.device)
        grad_CV = torch.where(ids_V == ids_CA, grad_CV + grad_CA, grad_CV)
    else:
        grad_CV.scatter_add_(1, ids_CA, grad_CA)
    if slope_CV is not None:
        grad_CV *= slope_CV
    return grad_CV.to(dtype)


def _columns(of_ids: torch.Tensor) -> torch.Tensor:
    """[C, A], also of one id for each token."""
    return of_ids[:, None] if of_ids.dim() == 1 else of_ids
