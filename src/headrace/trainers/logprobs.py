"""Log-probabilities of a packed row's tokens under a model, with gradients, in chunks of tokens.

In: a model that uses packed attention and a ``PackedRow``. Out: float32 log-probabilities (and entropies) of
the row's loss tokens at the temperatures they were sampled with, by ``whole_head``; tokens that were drawn from a
kept set (top-k, top-p, min-p) are valued over that set, by ``kept_head``. Both work on a chunk of tokens at a time,
so that float32 [tokens, vocabulary] never exists whole. Logits are float32 whatever the model is computed in.

Legend: T tokens of the row that are computed, N loss tokens, E those an environment wrote, H hidden size, V vocabulary.
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
from headrace.models.uploads import to_device
from headrace.trainers.head import chunk_length
from headrace.trainers.kept_head import KeptHeadLogprobs
from headrace.trainers.whole_head import HeadLogprobs

CHUNK_ELEMENTS = 2**24
"""Logits held at once: 64 MiB in float32."""
GPU_CHUNK_ELEMENTS = 2**28
"""1 GiB: with 150 thousand words, products of some 1700 tokens, which still fill a GPU many times over."""
KEPT_ELEMENTS = 2**24
GPU_KEPT_ELEMENTS = 2**31
"""Most slopes of logits kept for the backward: 4 GiB in bf16, of some 14,000 tokens with 150 thousand words."""


class EnvironmentTokens(NamedTuple):
    """Tokens of the row that an environment wrote between sampled ones."""

    predictors_E: torch.Tensor
    targets_E: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowTensors:
    """A packed row on the device, without the last token of each sequence, and reduced to its loss tokens where only
    those matter."""

    token_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    layout: PackedLayout
    predictors_N: torch.Tensor
    """Row position whose output predicts each loss token."""
    targets_N: torch.Tensor
    temperatures_N: torch.Tensor
    sequence_N: torch.Tensor
    segment_T: torch.Tensor
    """The segment of each computed token: those that end the sequences come first and in order, then prefixes."""
    prefix_S: torch.Tensor
    """The segment each sequence begins with, if that is another; else twice the number of sequences, which is none."""
    num_sequences: int
    kept: KeptSets | None
    """The kept sets of the loss tokens; None: all were drawn from the whole vocabulary."""
    routes: RowRoutes | None = None
    """What a mixture's routers chose when the tokens were sampled; None: not known."""
    environment: EnvironmentTokens | None = None
    """None: there are none, or nobody asks."""
    slope_tokens: int = 0
    """Of so many loss tokens the head keeps the slopes of logits for the backward, instead of computing the logits
    twice."""


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
    loss_tokens, computed = np.flatnonzero(row.loss_mask), row.computed
    num_before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(computed)])

    def put(array: np.ndarray) -> torch.Tensor:
        return to_device(array, device)

    return RowTensors(
        token_ids_T=put(row.token_ids[computed]),
        position_ids_T=put(row.position_ids[computed]),
        layout=build_layout(np.diff(num_before[row.cu_seqlens]), row.parents, device=device),
        predictors_N=put(num_before[loss_tokens - 1]),
        targets_N=put(row.token_ids[loss_tokens]),
        temperatures_N=put(row.temperatures[loss_tokens]),
        sequence_N=put(row.sequence[loss_tokens]),
        segment_T=put(_numbered_segments(row)[computed]),
        prefix_S=put(_numbered_prefixes(row)),
        num_sequences=row.num_sequences,
        kept=None
        if row.sampling_mask is None
        else kept_sets(rows_at(row.sampling_mask, loss_tokens), device),
        routes=_row_routes(row, computed, device),
        environment=_environment_tokens(row, num_before, device) if with_environment else None,
    )


def _numbered_segments(row: PackedRow) -> np.ndarray:
    """int64 [T], as ``RowTensors.segment_T`` numbers them."""
    num_prefixes, num_sequences = row.parents.size - row.num_sequences, row.num_sequences
    numbers = np.concatenate((num_sequences + np.arange(num_prefixes), np.arange(num_sequences)))
    return np.repeat(numbers, np.diff(row.cu_seqlens))


def _numbered_prefixes(row: PackedRow) -> np.ndarray:
    parents, num_sequences = row.parents[-row.num_sequences :], row.num_sequences
    return np.where(parents < 0, 2 * num_sequences, num_sequences + parents)


def _environment_tokens(
    row: PackedRow, num_before: np.ndarray, device: torch.device | str
) -> EnvironmentTokens | None:
    """``num_before``: computed tokens before each token."""
    places = np.flatnonzero(row.environment_mask)
    if not places.size:
        return None
    given = num_before[places - 1], row.token_ids[places]
    return EnvironmentTokens(*(to_device(ids, device) for ids in given))


def _row_routes(row: PackedRow, computed: np.ndarray, device: torch.device | str) -> RowRoutes | None:
    if row.routes is None or row.routed is None:
        return None
    # Layers apart, so that each reads one piece of memory. Kernels know little of uint16; experts are below 2^15.
    experts_MTK = np.ascontiguousarray(row.routes[computed].swapaxes(0, 1))
    experts_MTK = experts_MTK.view(np.int16) if experts_MTK.dtype == np.uint16 else experts_MTK
    return RowRoutes(to_device(experts_MTK, device), to_device(row.routed[computed], device))


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
        logprobs_N, entropy_N = HeadLogprobs.apply(*given, row.slope_tokens)
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
    logprobs, entropy = HeadLogprobs.apply(*given(free), row.slope_tokens)
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


def slope_tokens(num_tokens: int, *, vocab_size: int, on_gpu: bool) -> int:
    """Most of a row's tokens whose slopes are worth their memory."""
    return min(num_tokens, (GPU_KEPT_ELEMENTS if on_gpu else KEPT_ELEMENTS) // vocab_size)


def kept_slope_bytes(row: RowTensors, weight_VH: torch.Tensor) -> int:
    """What the head keeps of the slopes of a row's logits until its backward, at least: whole chunks from the end."""
    num_tokens = row.targets_N.numel()
    num_kept = min(row.slope_tokens, num_tokens)
    if row.kept is not None:
        num_kept = 0
    elif num_kept < num_tokens:
        num_kept = max(num_kept - chunk_tokens(weight_VH), 0)
    return num_kept * weight_VH.shape[0] * weight_VH.dtype.itemsize


def head_bytes(
    num_tokens: int,
    *,
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    on_gpu: bool,
    own_gradient: bool = True,
) -> int:
    """The most that the head's forward and backward over so many loss tokens hold, slopes apart. Without
    ``own_gradient`` the weight's gradient is added to a master's, or there is none."""
    width = dtype.itemsize
    chunk = chunk_length(num_tokens, _chunk_tokens(vocab_size, on_gpu=on_gpu))
    # Where nothing is fused, two results on the way stand beside the logits.
    logits = (4 + width if on_gpu else 12) * chunk
    # A narrow gradient is summed in float32, and stands beside that of a tied embedding.
    gradient = (4 if dtype == torch.float32 else 4 + 2 * width) * vocab_size * hidden_size
    # Hidden states and their gradient, and beside them one of the two at its factor, in float32 and narrow.
    states = (4 + 3 * width) * num_tokens * hidden_size
    return logits * vocab_size + own_gradient * gradient + states
