"""Log-probabilities over recorded kept sets (top-k, top-p, min-p), in chunks of tokens.

In: what the unmasked head takes, and each token's kept set K. Out: log softmax over K at the target, the entropy
over K, and the mass of K under the whole distribution. Tokens outside K get a gradient of exactly zero: nothing
they did could have been sampled.

A chunk's logits are computed whole and K is picked out of them. The other way, products of each token with only the
rows of the weight that it kept, is cheaper while all sets are small and dearer once some hold hundreds of ids
(``headrace bench head`` measures both); it would leave the mass unknown, sum weight gradients in an order that a GPU
does not repeat, and compute other bits than the unmasked head. This way costs about what the whole vocabulary does,
whatever was kept, and less in the backward: the logits of K are remembered (four bytes for each recorded id), so that
of the head's four matrix products three are left.

Legend: N loss tokens, C tokens of a chunk, H hidden size, V vocabulary, S kept ids over all tokens, K ids of the
largest set of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch

from headrace.kernels.chip import has_kernels
from headrace.models.kept_sets import KeptSets
from headrace.trainers.head import (
    HeadGradients,
    capped_logits,
    chunks,
)


class KeptHeadLogprobs(torch.autograd.Function):
    """Every token has a kept set, and its target is in it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperatures_N: torch.Tensor,
        softcap: float | None,
        chunk_tokens: int,
        master_VH: torch.Tensor | None,
        kept: KeptSets,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_tokens = hidden_NH.shape[0]
        logprobs_N = hidden_NH.new_empty(num_tokens, dtype=torch.float32)
        entropy_N, mass_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        normaliser_N, logits_S = torch.empty_like(logprobs_N), []
        for chunk in chunks(num_tokens, chunk_tokens):
            sets, temperatures_C = kept.chunk(chunk), temperatures_N[chunk]
            logits_CV = capped_logits(hidden_NH[chunk], weight_VH, bias_V, softcap)
            logits_S.append(sets.pick(logits_CV))
            whole_C = _normaliser(logits_CV, targets_N[chunk], temperatures_C)
            targets_C = logits_CV.gather(1, targets_N[chunk, None])[:, 0] / temperatures_C
            del logits_CV
            normaliser_N[chunk], entropy_N[chunk] = _set_values(
                sets.padded(logits_S[-1] / temperatures_C[sets.tokens_S])
            )
            logprobs_N[chunk] = targets_C - normaliser_N[chunk]
            mass_N[chunk] = (normaliser_N[chunk] - whole_C).exp()
        ctx.save_for_backward(
            hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, normaliser_N, *logits_S
        )
        ctx.softcap, ctx.chunk_tokens, ctx.master_VH, ctx.kept = softcap, chunk_tokens, master_VH, kept
        ctx.mark_non_differentiable(entropy_N, mass_N)
        return logprobs_N, entropy_N, mass_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, normaliser_N, *logits_S = ctx.saved_tensors
        gradients = HeadGradients(ctx.needs_input_grad, hidden_NH, weight_VH, bias_V, ctx.master_VH)
        parts = chunks(hidden_NH.shape[0], ctx.chunk_tokens)
        for chunk, chunk_logits_S in zip(parts, logits_S, strict=True):
            sets = ctx.kept.chunk(chunk)
            grad_S = _logit_gradient(
                chunk_logits_S, sets, targets_N[chunk], temperatures_N[chunk], normaliser_N[chunk], grad_N[chunk],
                ctx.softcap,
            )  # fmt: skip
            grad_CV = sets.put(grad_S.to(hidden_NH.dtype), vocab_size=weight_VH.shape[0])
            gradients.add(chunk, grad_CV)
        return *gradients.results(), None, None, None, None, None, None


def _normaliser(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, temperatures_C: torch.Tensor
) -> torch.Tensor:
    """Over the whole vocabulary."""
    if not has_kernels(logits_CV.device):
        return (logits_CV / temperatures_C[:, None]).logsumexp(-1)
    from headrace.kernels.head_values import token_values

    return token_values(logits_CV, targets_C, temperatures_C, None)[0]


def _set_values(logits_CK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Normaliser and entropy of every token, over its set; from logits at its temperature."""
    normaliser_C = logits_CK.logsumexp(-1)
    logprobs_CK = logits_CK - normaliser_C[:, None]
    return normaliser_C, -(logprobs_CK.exp() * logprobs_CK).sum(-1)


def _logit_gradient(
    logits_S: torch.Tensor,
    sets: KeptSets,
    targets_C: torch.Tensor,
    temperatures_C: torch.Tensor,
    normaliser_C: torch.Tensor,
    grad_C: torch.Tensor,
    softcap: float | None,
) -> torch.Tensor:
    """float32 [S], of the uncapped logits."""
    at_S = sets.tokens_S
    probs_S = (logits_S / temperatures_C[at_S] - normaliser_C[at_S]).exp_()
    is_target_S = (sets.ids_S == targets_C[at_S]).float()
    grad_S = (is_target_S - probs_S) * (grad_C / temperatures_C)[at_S]
    return grad_S if softcap is None else grad_S * (1 - (logits_S / softcap).square())
