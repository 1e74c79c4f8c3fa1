"""Log-probabilities of a packed row's tokens under a model, with gradients, in chunks of tokens.

In: a model that uses packed attention and a ``PackedRow``. Out: float32 log-probabilities (and entropies) of
the row's loss tokens at the temperatures they were sampled with. [tokens, vocabulary] never exists
whole: the forward keeps one normaliser per token, and the backward recomputes one chunk of logits at a
time. The head is computed in float32 whatever the rest is computed in.

Legend: T tokens of the row, N loss tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.data.packing import PackedRow
from headrace.errors import ModelError
from headrace.models.packed_attention import PackedLayout, build_layout

CHUNK_ELEMENTS = 2**24
"""Logits held at once: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class RowTensors:
    """A packed row on the device, reduced to its loss tokens where only those matter."""

    token_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    layout: PackedLayout
    predictors_N: torch.Tensor
    """Row position whose output predicts each loss token."""
    targets_N: torch.Tensor
    temperatures_N: torch.Tensor
    sequence_N: torch.Tensor
    num_sequences: int


def row_tensors(row: PackedRow, *, device: torch.device | str) -> RowTensors:
    loss_tokens = np.flatnonzero(row.loss_mask)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return RowTensors(
        token_ids_T=put(row.token_ids),
        position_ids_T=put(row.position_ids),
        layout=build_layout(np.diff(row.cu_seqlens), device=device),
        predictors_N=put(loss_tokens - 1),
        targets_N=put(row.token_ids[loss_tokens]),
        temperatures_N=put(row.temperatures[loss_tokens]),
        sequence_N=put(row.sequence[loss_tokens]),
        num_sequences=row.num_sequences,
    )


def token_logprobs(
    model: PreTrainedModel, row: RowTensors, *, compute_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N] log-probabilities of the loss tokens, and the entropies (without gradient) beside them."""
    device_type = row.token_ids_T.device.type
    with torch.autocast(device_type, dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16):
        hidden_TH = model.get_decoder()(
            input_ids=row.token_ids_T[None],
            position_ids=row.position_ids_T[None],
            use_cache=False,
            packed_layout=row.layout,
        ).last_hidden_state[0]
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"model: {type(model).__name__} has no linear output head; choose a causal language model"
        )
    return _HeadLogprobs.apply(
        hidden_TH.index_select(0, row.predictors_N),
        head.weight,
        head.bias,
        row.targets_N,
        row.temperatures_N,
        getattr(model.config, "final_logit_softcapping", None),
        max(CHUNK_ELEMENTS // head.weight.shape[0], 1),
    )


class _HeadLogprobs(torch.autograd.Function):
    """log softmax(softcap(hidden @ weight.T + bias) / temperature) at the targets, chunk by chunk."""

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = hidden_NH.shape[0]
        logprobs_N = hidden_NH.new_empty(num_tokens, dtype=torch.float32)
        entropy_N, normaliser_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for chunk in _chunks(num_tokens, chunk_tokens):
            logits_CV = _logits(hidden_NH[chunk], weight_VH, bias_V, softcap)[0]
            logits_CV /= temperatures_N[chunk, None]
            normaliser_N[chunk] = logits_CV.logsumexp(-1)
            logprobs_N[chunk] = logits_CV.gather(1, targets_N[chunk, None])[:, 0] - normaliser_N[chunk]
            probs_CV = (logits_CV - normaliser_N[chunk, None]).exp_()
            entropy_N[chunk] = normaliser_N[chunk] - probs_CV.mul_(logits_CV).sum(-1)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, normaliser_N)
        ctx.softcap, ctx.chunk_tokens = softcap, chunk_tokens
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_N: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None, None, None, None]:
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, normaliser_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for chunk in _chunks(hidden_NH.shape[0], ctx.chunk_tokens):
            logits_CV, slope_CV = _logits(hidden_NH[chunk], weight_VH, bias_V, ctx.softcap)
            temperature_C1 = temperatures_N[chunk, None]
            scale_C1 = grad_N[chunk, None] / temperature_C1
            grad_CV = (logits_CV.div_(temperature_C1) - normaliser_N[chunk, None]).exp_().mul_(-scale_C1)
            grad_CV.scatter_add_(1, targets_N[chunk, None], scale_C1)
            if slope_CV is not None:
                grad_CV *= slope_CV
            hidden_CH = hidden_NH[chunk].float()
            with _float32(hidden_CH):
                grad_hidden_NH[chunk] = (grad_CV @ weight_VH.float()).to(hidden_NH.dtype)
                grad_weight_VH.addmm_(grad_CV.T, hidden_CH)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
        grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]


def _logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Capped float32 logits, and the slope of the cap (None without one)."""
    with _float32(hidden_CH):
        logits_CV = hidden_CH.float() @ weight_VH.float().T
    if bias_V is not None:
        logits_CV += bias_V.float()
    if softcap is None:
        return logits_CV, None
    tanh_CV = torch.tanh(logits_CV / softcap)
    return tanh_CV * softcap, 1 - tanh_CV.square()


def _float32(like: torch.Tensor) -> torch.autocast:
    return torch.autocast(like.device.type, enabled=False)
