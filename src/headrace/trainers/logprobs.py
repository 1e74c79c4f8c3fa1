"""Log-probabilities of a packed row's tokens under a model, with gradients, in chunks of tokens.

In: a model that uses packed attention and a ``PackedRow``. Out: float32 log-probabilities (and entropies) of
the row's loss tokens at the temperatures they were sampled with. [tokens, vocabulary] never exists
whole: the forward keeps one normaliser per token, and the backward recomputes one chunk of logits at a
time. Logits are float32 whatever the model is computed in.

Legend: T tokens of the row, N loss tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.data.packing import PackedRow
from headrace.errors import ModelError
from headrace.models.packed_attention import PackedLayout, build_layout
from headrace.models.route_replay import RowRoutes, follow_routes
from headrace.trainers.head import add_head_weight_gradient, head_input_gradient, head_logits

CHUNK_ELEMENTS = 2**24
"""Logits held at once: 64 MiB in float32."""
GPU_CHUNK_ELEMENTS = 2**29
"""2 GiB: the matrix products of shorter chunks leave a GPU half idle."""


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
    sequence_T: torch.Tensor
    num_sequences: int
    routes: RowRoutes | None = None
    """What a mixture's routers chose when the tokens were sampled; None: not known."""


def row_tensors(row: PackedRow, *, device: torch.device | str) -> RowTensors:
    loss_tokens = np.flatnonzero(row.loss_mask)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return RowTensors(
        token_ids_T=put(row.token_ids),
        position_ids_T=put(row.position_ids),
        layout=build_layout(np.diff(row.cu_seqlens), row.parents, device=device),
        predictors_N=put(loss_tokens - 1),
        targets_N=put(row.token_ids[loss_tokens]),
        temperatures_N=put(row.temperatures[loss_tokens]),
        sequence_N=put(row.sequence[loss_tokens]),
        sequence_T=put(row.sequence),
        num_sequences=row.num_sequences,
        routes=_row_routes(row, device),
    )


def _row_routes(row: PackedRow, device: torch.device | str) -> RowRoutes | None:
    if row.routes is None or row.routed is None:
        return None
    # Layers apart, so that each reads one piece of memory. Kernels know little of uint16; experts are below 2^15.
    experts_MTK = np.ascontiguousarray(row.routes.swapaxes(0, 1))
    experts_MTK = experts_MTK.view(np.int16) if experts_MTK.dtype == np.uint16 else experts_MTK
    return RowRoutes(torch.from_numpy(experts_MTK).to(device), torch.from_numpy(row.routed).to(device))


def token_logprobs(model: PreTrainedModel, row: RowTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N] log-probabilities of the loss tokens, and the entropies (without gradient) beside them."""
    hidden_TH = decoder_output(model, row)
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
        chunk_tokens(head.weight),
    )


def decoder_output(model: PreTrainedModel, row: RowTensors) -> torch.Tensor:
    """[T, H], what the head reads."""
    follow_routes(model, row.routes)
    return model.get_decoder()(
        input_ids=row.token_ids_T[None],
        position_ids=row.position_ids_T[None],
        use_cache=False,
        packed_layout=row.layout,
    ).last_hidden_state[0]


def chunk_tokens(weight_VH: torch.Tensor) -> int:
    """Tokens whose logits are held at once."""
    return _chunk_tokens(weight_VH.shape[0], on_gpu=weight_VH.is_cuda)


def _chunk_tokens(vocab_size: int, *, on_gpu: bool) -> int:
    return max((GPU_CHUNK_ELEMENTS if on_gpu else CHUNK_ELEMENTS) // vocab_size, 1)


def head_bytes(
    num_tokens: int,
    *,
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    on_gpu: bool,
    trained: bool = True,
) -> int:
    """The most that the head's forward and backward over so many loss tokens hold. A head that is not
    ``trained`` has no gradient."""
    width = dtype.itemsize
    chunk = min(_chunk_tokens(vocab_size, on_gpu=on_gpu), num_tokens)
    following = min(chunk, num_tokens - chunk)
    # A chunk's logits and gradient are let go when the next one's logits are there.
    logits = (4 + width) * chunk + 4 * following
    if not on_gpu:
        # Nothing is fused: two results on the way stand beside the logits.
        logits = max(12 * chunk, 4 * chunk + 12 * following)
    # A narrow gradient is summed in float32, and stands beside that of a tied embedding.
    gradient = (4 if dtype == torch.float32 else 4 + 2 * width) * vocab_size * hidden_size
    return logits * vocab_size + trained * gradient + 2 * num_tokens * hidden_size * width


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
        token_values = _fused(_token_values, hidden_NH.device.type)
        for chunk in _chunks(num_tokens, chunk_tokens):
            logits_CV = _logits(hidden_NH[chunk], weight_VH, bias_V, softcap)[0]
            normaliser_N[chunk], logprobs_N[chunk], entropy_N[chunk] = token_values(
                logits_CV, targets_N[chunk], temperatures_N[chunk]
            )
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, normaliser_N)
        ctx.softcap, ctx.chunk_tokens = softcap, chunk_tokens
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_N: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, None, None, None, None]:
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, normaliser_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = grad_bias_V = None
        if ctx.needs_input_grad[1]:
            grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        if ctx.needs_input_grad[2]:
            grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32)
        logit_gradient = _fused(_logit_gradient, hidden_NH.device.type)
        for chunk in _chunks(hidden_NH.shape[0], ctx.chunk_tokens):
            logits_CV, slope_CV = _logits(hidden_NH[chunk], weight_VH, bias_V, ctx.softcap)
            grad_CV = logit_gradient(
                logits_CV, slope_CV, targets_N[chunk], temperatures_N[chunk], normaliser_N[chunk], grad_N[chunk],
                hidden_NH.dtype,
            )  # fmt: skip
            grad_hidden_NH[chunk] = head_input_gradient(grad_CV, weight_VH)
            if grad_weight_VH is not None:
                add_head_weight_gradient(grad_weight_VH, grad_CV, hidden_NH[chunk])
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.float().sum(0)
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]


def _logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Capped float32 logits, and the slope of the cap (None without one)."""
    logits_CV = head_logits(hidden_CH, weight_VH)
    if bias_V is not None:
        logits_CV += bias_V.float()
    if softcap is None:
        return logits_CV, None
    tanh_CV = torch.tanh(logits_CV / softcap)
    return tanh_CV * softcap, 1 - tanh_CV.square()


def _token_values(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, temperatures_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normaliser, log-probability of the target and entropy of every token."""
    logits_CV = logits_CV / temperatures_C[:, None]
    normaliser_C = logits_CV.logsumexp(-1)
    logprobs_C = logits_CV.gather(1, targets_C[:, None])[:, 0] - normaliser_C
    probs_CV = (logits_CV - normaliser_C[:, None]).exp_()
    return normaliser_C, logprobs_C, normaliser_C - probs_CV.mul_(logits_CV).sum(-1)


def _logit_gradient(
    logits_CV: torch.Tensor,
    slope_CV: torch.Tensor | None,
    targets_C: torch.Tensor,
    temperatures_C: torch.Tensor,
    normaliser_C: torch.Tensor,
    grad_C: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient of the uncapped logits in ``dtype``."""
    temperature_C1 = temperatures_C[:, None]
    scale_C1 = grad_C[:, None] / temperature_C1
    grad_CV = (logits_CV / temperature_C1 - normaliser_C[:, None]).exp_().mul_(-scale_C1)
    if torch.compiler.is_compiling():
        # The same sum where the scatter would be a second pass over the chunk.
        ids_V = torch.arange(grad_CV.shape[1], device=grad_CV.device)
        grad_CV = torch.where(ids_V == targets_C[:, None], grad_CV + scale_C1, grad_CV)
    else:
        grad_CV.scatter_add_(1, targets_C[:, None], scale_C1)
    if slope_CV is not None:
        grad_CV *= slope_CV
    return grad_CV.to(dtype)


@cache
def _fused(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """On a GPU each function is one or two passes over its chunk instead of a dozen. The vocabulary stays a
    constant of the compiled code; a chunk of another length makes its length a variable."""
    return torch.compile(function) if device_type == "cuda" else function
