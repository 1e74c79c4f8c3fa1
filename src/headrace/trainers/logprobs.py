"""Log-probabilities of a packed row's tokens under a model, with gradients, in chunks of tokens.

In: a model that uses packed attention and a ``PackedRow``. Out: float32 log-probabilities (and entropies) of
the row's loss tokens at the temperatures they were sampled with. [tokens, vocabulary] never exists
whole: the forward keeps one normaliser per token, and the backward recomputes one chunk of logits at a
time, which is gone before the next one is made. Logits are float32 whatever the model is computed in. Tokens that
were drawn from a kept set (top-k, top-p, min-p) are valued over that set, by ``kept_head``.

Legend: T tokens of the row, N loss tokens, E those an environment wrote, C tokens of a chunk, A ids at each, H hidden
size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.data.masks import rows_at
from headrace.data.packing import PackedRow
from headrace.errors import ModelError
from headrace.models.kept_sets import KeptSets, kept_sets
from headrace.models.packed_attention import PackedLayout, build_layout
from headrace.models.route_replay import RowRoutes, follow_routes
from headrace.trainers.head import (
    HeadGradients,
    chunk_length,
    chunks,
    fused,
    uncapped_logits,
)
from headrace.trainers.kept_head import KeptHeadLogprobs

CHUNK_ELEMENTS = 2**24
"""Logits held at once: 64 MiB in float32."""
GPU_CHUNK_ELEMENTS = 2**28
"""1 GiB: with 150 thousand words, products of some 1700 tokens, which still fill a GPU many times over."""


class EnvironmentTokens(NamedTuple):
    """Tokens of the row that an environment wrote between sampled ones."""

    predictors_E: torch.Tensor
    targets_E: torch.Tensor


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
    kept: KeptSets | None
    """The kept sets of the loss tokens; None: all were drawn from the whole vocabulary."""
    routes: RowRoutes | None = None
    """What a mixture's routers chose when the tokens were sampled; None: not known."""
    environment: EnvironmentTokens | None = None
    """None: there are none, or nobody asks."""


class TokenValues(NamedTuple):
    """What the head says of a row's loss tokens, all float32 [N]."""

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor
    """Without gradient, as ``kept_mass_N``."""
    kept_mass_N: torch.Tensor | None
    """Probability of the kept set under the model's whole distribution, nan where nothing was cut; None: nowhere."""
    environment_E: torch.Tensor | None = None
    """Log-probabilities of the environment's tokens with gradient, at temperature 1; None: they were not asked for."""


def row_tensors(row: PackedRow, *, device: torch.device | str, with_environment: bool = False) -> RowTensors:
    """``with_environment``: also what is needed to value the tokens that an environment wrote."""
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
        kept=None
        if row.sampling_mask is None
        else kept_sets(rows_at(row.sampling_mask, loss_tokens), device),
        routes=_row_routes(row, device),
        environment=_environment_tokens(row, device) if with_environment else None,
    )


def _environment_tokens(row: PackedRow, device: torch.device | str) -> EnvironmentTokens | None:
    places = np.flatnonzero(row.environment_mask)
    if not places.size:
        return None
    predictors, targets = (torch.from_numpy(ids).to(device) for ids in (places - 1, row.token_ids[places]))
    return EnvironmentTokens(predictors, targets)


def _row_routes(row: PackedRow, device: torch.device | str) -> RowRoutes | None:
    if row.routes is None or row.routed is None:
        return None
    # Layers apart, so that each reads one piece of memory. Kernels know little of uint16; experts are below 2^15.
    experts_MTK = np.ascontiguousarray(row.routes.swapaxes(0, 1))
    experts_MTK = experts_MTK.view(np.int16) if experts_MTK.dtype == np.uint16 else experts_MTK
    return RowRoutes(torch.from_numpy(experts_MTK).to(device), torch.from_numpy(row.routed).to(device))


def token_logprobs(model: PreTrainedModel, row: RowTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N] log-probabilities of the loss tokens, and the entropies (without gradient) beside them."""
    values = head_values(model, row)
    return values.logprobs_N, values.entropy_N


def head_values(
    model: PreTrainedModel, row: RowTensors, *, head_master: torch.Tensor | None = None
) -> TokenValues:
    """Log-probabilities of the loss tokens with gradient, each over the set it was drawn from. The gradient of the
    head's weight is added to that of ``head_master``, where one is given, and to its own otherwise."""
    hidden_TH = decoder_output(model, row)
    values = _loss_token_values(model, hidden_TH, row, head_master)
    if row.environment is None:
        return values
    environment_E = _environment_logprobs(model, hidden_TH, row.environment, head_master)
    return values._replace(environment_E=environment_E)


def _environment_logprobs(
    model: PreTrainedModel,
    hidden_TH: torch.Tensor,
    tokens: EnvironmentTokens,
    head_master: torch.Tensor | None,
) -> torch.Tensor:
    """A pass of its own over the head, so that those of the loss tokens are cut into chunks as ever."""
    head, hidden_EH = linear_head(model), hidden_TH.index_select(0, tokens.predictors_E)
    logprobs_E, _ = HeadLogprobs.apply(
        hidden_EH, head.weight, head.bias, tokens.targets_E,
        torch.ones_like(tokens.targets_E, dtype=torch.float32),
        getattr(model.config, "final_logit_softcapping", None), chunk_tokens(head.weight), head_master,
    )  # fmt: skip
    return logprobs_E


def _loss_token_values(
    model: PreTrainedModel, hidden_TH: torch.Tensor, row: RowTensors, head_master: torch.Tensor | None
) -> TokenValues:
    head = linear_head(model)
    hidden_NH = hidden_TH.index_select(0, row.predictors_N)
    softcap = getattr(model.config, "final_logit_softcapping", None)
    rest = softcap, chunk_tokens(head.weight), head_master
    given = hidden_NH, head.weight, head.bias, row.targets_N, row.temperatures_N, *rest
    if row.kept is None:
        logprobs_N, entropy_N = HeadLogprobs.apply(*given)
        return TokenValues(logprobs_N, entropy_N, None)
    if row.kept.all_cut:
        return TokenValues(*KeptHeadLogprobs.apply(*given, row.kept))
    return _mixed_values(hidden_NH, head, row, row.kept, *rest)


def _mixed_values(
    hidden_NH: torch.Tensor,
    head: nn.Linear,
    row: RowTensors,
    kept: KeptSets,
    softcap: float | None,
    chunk_tokens: int,
    head_master: torch.Tensor | None,
) -> TokenValues:
    """Tokens with and without a kept set in one row: each kind goes through its own head."""

    def given(which: torch.Tensor) -> tuple[Any, ...]:
        targets, temperatures = row.targets_N[which], row.temperatures_N[which]
        return (
            hidden_NH[which],
            head.weight,
            head.bias,
            targets,
            temperatures,
            softcap,
            chunk_tokens,
            head_master,
        )

    free, cut = kept.free_and_cut()
    logprobs, entropy = HeadLogprobs.apply(*given(free))
    cut_logprobs, cut_entropy, cut_mass = KeptHeadLogprobs.apply(*given(cut), kept.only_cut())
    at_N = torch.cat((free, cut)).argsort()
    return TokenValues(
        torch.cat((logprobs, cut_logprobs))[at_N],
        torch.cat((entropy, cut_entropy))[at_N],
        torch.cat((torch.full_like(entropy, torch.nan), cut_mass))[at_N],
    )


def linear_head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"model: {type(model).__name__} has no linear output head; choose a causal language model"
        )
    return head


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
    own_gradient: bool = True,
) -> int:
    """The most that the head's forward and backward over so many loss tokens hold. Without ``own_gradient`` the
    weight's gradient is added to a master's, or there is none."""
    width = dtype.itemsize
    chunk = chunk_length(num_tokens, _chunk_tokens(vocab_size, on_gpu=on_gpu))
    # Where nothing is fused, two results on the way stand beside the logits.
    logits = (4 + width if on_gpu else 12) * chunk
    # A narrow gradient is summed in float32, and stands beside that of a tied embedding.
    gradient = (4 if dtype == torch.float32 else 4 + 2 * width) * vocab_size * hidden_size
    return logits * vocab_size + own_gradient * gradient + 2 * num_tokens * hidden_size * width


class HeadLogprobs(torch.autograd.Function):
    """log softmax(softcap(hidden @ weight.T + bias) / temperature) at the ids, chunk by chunk: one id for each token
    [N], or several [N, A]. Values and their gradient have the shape of the ids."""

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = hidden_NH.shape[0]
        logprobs = hidden_NH.new_empty(ids.shape, dtype=torch.float32)
        entropy_N = hidden_NH.new_empty(num_tokens, dtype=torch.float32)
        normaliser_N = torch.empty_like(entropy_N)
        for chunk in chunks(num_tokens, chunk_tokens):
            # Logits have no name here: they are gone before the next chunk's are made.
            normaliser_N[chunk], logprobs[chunk], entropy_N[chunk] = _token_values(
                uncapped_logits(hidden_NH[chunk], weight_VH, bias_V),
                ids[chunk],
                temperatures_N[chunk],
                softcap,
            )
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids, temperatures_N, normaliser_N)
        ctx.softcap, ctx.chunk_tokens, ctx.master_VH = softcap, chunk_tokens, master_VH
        ctx.mark_non_differentiable(entropy_N)
        return logprobs, entropy_N

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, ids, temperatures_N, normaliser_N = ctx.saved_tensors
        gradients = HeadGradients(ctx.needs_input_grad, hidden_NH, weight_VH, bias_V, ctx.master_VH)
        logit_gradient = fused(_logit_gradient, hidden_NH.device.type)
        for chunk in chunks(hidden_NH.shape[0], ctx.chunk_tokens):
            grad_CV = logit_gradient(
                uncapped_logits(hidden_NH[chunk], weight_VH, bias_V), ids[chunk], temperatures_N[chunk],
                normaliser_N[chunk], grad[chunk], ctx.softcap, hidden_NH.dtype,
            )  # fmt: skip
            gradients.add(chunk, grad_CV)
            del grad_CV
        return *gradients.results(), None, None, None, None, None


def _token_values(
    logits_CV: torch.Tensor, ids: torch.Tensor, temperatures_C: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normaliser, log-probabilities at the ids and entropy of every token."""
    if not logits_CV.is_cuda:
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
