"""Log-probabilities of several given tokens at each loss token's place, with gradients, in chunks of tokens.

In: what the head reads and the ids to be evaluated at each place. Out: float32 log-probabilities of all of them,
and the entropies. As in ``logprobs``, [tokens, vocabulary] never exists whole: one normaliser per token is kept,
and the backward computes one chunk of logits at a time again.

Legend: N loss tokens, A ids at each, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.errors import ModelError
from headrace.trainers.head import (
    HeadGradients,
    chunks,
    fused,
    uncapped_logits,
)
from headrace.trainers.logprobs import RowTensors, chunk_tokens, decoder_output


def logprobs_at(
    model: PreTrainedModel,
    row: RowTensors,
    ids_NA: torch.Tensor,
    *,
    head_master: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N, A] log-probabilities of ``ids_NA`` where the loss tokens stand, and the entropies [N] (without
    gradient) beside them. ``head_master`` as for ``logprobs.head_values``."""
    hidden_TH = decoder_output(model, row)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"model: {type(model).__name__} has no linear output head; choose a causal language model"
        )
    return HeadAtIds.apply(
        hidden_TH.index_select(0, row.predictors_N),
        head.weight,
        head.bias,
        ids_NA,
        row.temperatures_N,
        getattr(model.config, "final_logit_softcapping", None),
        chunk_tokens(head.weight),
        head_master,
    )


class HeadAtIds(torch.autograd.Function):
    """log softmax(softcap(hidden @ weight.T + bias) / temperature) at the ids, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        ids_NA: torch.Tensor,
        temperatures_N: torch.Tensor,
        softcap: float | None,
        chunk_tokens: int,
        master_VH: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_NA = hidden_NH.new_empty(ids_NA.shape, dtype=torch.float32)
        entropy_N = hidden_NH.new_empty(hidden_NH.shape[0], dtype=torch.float32)
        normaliser_N = torch.empty_like(entropy_N)
        values = fused(_values_at, hidden_NH.device.type)
        for chunk in chunks(hidden_NH.shape[0], chunk_tokens):
            normaliser_N[chunk], logprobs_NA[chunk], entropy_N[chunk] = values(
                uncapped_logits(hidden_NH[chunk], weight_VH, bias_V),
                ids_NA[chunk],
                temperatures_N[chunk],
                softcap,
            )
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids_NA, temperatures_N, normaliser_N)
        ctx.softcap, ctx.chunk_tokens, ctx.master_VH = softcap, chunk_tokens, master_VH
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_NA, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_NA: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, ids_NA, temperatures_N, normaliser_N = ctx.saved_tensors
        gradients = HeadGradients(ctx.needs_input_grad, hidden_NH, weight_VH, bias_V, ctx.master_VH)
        logit_gradient = fused(_logit_gradient_at, hidden_NH.device.type)
        for chunk in chunks(hidden_NH.shape[0], ctx.chunk_tokens):
            grad_CV = logit_gradient(
                uncapped_logits(hidden_NH[chunk], weight_VH, bias_V), ids_NA[chunk], temperatures_N[chunk],
                normaliser_N[chunk], grad_NA[chunk], ctx.softcap, hidden_NH.dtype,
            )  # fmt: skip
            gradients.add(chunk, grad_CV)
            del grad_CV
        return *gradients.results(), None, None, None, None, None


def _values_at(
    logits_CV: torch.Tensor, ids_CA: torch.Tensor, temperatures_C: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normaliser, log-probabilities at the ids and entropy of every token."""
    if softcap is not None:
        logits_CV = torch.tanh(logits_CV / softcap) * softcap
    logits_CV = logits_CV / temperatures_C[:, None]
    normaliser_C = logits_CV.logsumexp(-1)
    logprobs_CA = logits_CV.gather(1, ids_CA) - normaliser_C[:, None]
    probs_CV = (logits_CV - normaliser_C[:, None]).exp_()
    return normaliser_C, logprobs_CA, normaliser_C - probs_CV.mul_(logits_CV).sum(-1)


def _logit_gradient_at(
    logits_CV: torch.Tensor,
    ids_CA: torch.Tensor,
    temperatures_C: torch.Tensor,
    normaliser_C: torch.Tensor,
    grad_CA: torch.Tensor,
    softcap: float | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient of the uncapped logits in ``dtype``; an id that is given twice counts twice."""
    temperature_C1 = temperatures_C[:, None]
    slope_CV = None
    if softcap is not None:
        tanh_CV = torch.tanh(logits_CV / softcap)
        logits_CV, slope_CV = tanh_CV * softcap, 1 - tanh_CV.square()
    grad_CA = grad_CA / temperature_C1
    probs_CV = (logits_CV / temperature_C1 - normaliser_C[:, None]).exp_()
    grad_CV = probs_CV.mul_(-grad_CA.sum(-1, keepdim=True)).scatter_add_(1, ids_CA, grad_CA)
    if slope_CV is not None:
        grad_CV *= slope_CV
    return grad_CV.to(dtype)
