"""Log-probabilities of the same tokens, by every way there is to compute them here.

In: a model, prompts, and sampled tokens. Out: float32 [S, L], one value for each sampled token, whoever computes
it: the engine's decoding passes, its prefill passes, the trainer as it trains, the trainer with one part swapped,
or a float32 reference. Logits exist for one chunk of tokens at a time.

Shape legend: S samples, P prompt tokens, L sampled tokens of each, N loss tokens of a row, C tokens of a chunk,
H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel

from headrace.data.packing import PackedRow, pack
from headrace.engines.torch_engine import TorchEngine
from headrace.models.packed_attention import packed_attention, use_packed_attention
from headrace.trainers.head import head_logits
from headrace.trainers.logprobs import RowTensors, chunk_tokens, decoder_output, row_tensors, token_logprobs
from headrace.types import NO_KV, Request, Sample, Sampling

EXACT_ATTENTION = "headrace_exact"


def sample_with_engine(
    engine: TorchEngine, prompts_SP: np.ndarray, num_tokens: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """int32 [S, L] tokens, all samples decoded together, and the log-probabilities they were drawn with."""
    for index, prompt in enumerate(prompts_SP):
        sampling = Sampling(max_tokens=num_tokens)
        engine.submit(
            Request(id=str(index), prompt_ids=prompt, sampling=sampling, seed=seed * 100_000 + index)
        )
    token_ids_SL = np.zeros((len(prompts_SP), num_tokens), dtype=np.int32)
    logprobs_SL = np.zeros(token_ids_SL.shape, dtype=np.float32)
    while engine.has_work:
        for name, completion in engine.step():
            token_ids_SL[int(name)], logprobs_SL[int(name)] = completion.token_ids, completion.logprobs
    return token_ids_SL, logprobs_SL


def score_with_engine(engine: TorchEngine, prompts_SP: np.ndarray, token_ids_SL: np.ndarray) -> np.ndarray:
    """The same by prefill passes, one sequence at a time."""
    scored = engine.score(list(np.concatenate([prompts_SP, token_ids_SL], axis=1)))
    return np.stack(scored)[:, prompts_SP.shape[1] :]


def packed_rows(
    prompts_SP: np.ndarray, token_ids_SL: np.ndarray, *, row_tokens: int, share_prefixes: bool
) -> tuple[PackedRow, ...]:
    """The rows a trainer would make of these samples; equal prompts are attempts at one task."""
    _, groups_S = np.unique(prompts_SP, axis=0, return_inverse=True)
    samples = [
        _sample(int(group), attempt, prompt, tokens)
        for attempt, (group, prompt, tokens) in enumerate(
            zip(groups_S.reshape(-1), prompts_SP, token_ids_SL, strict=True)
        )
    ]
    return pack(samples, row_tokens=row_tokens, share_prefixes=share_prefixes)


def row_values(
    rows: Sequence[PackedRow], device: torch.device, values_of: Callable[[RowTensors], torch.Tensor]
) -> np.ndarray:
    """float32 [S, L] from what ``values_of`` says of each row's loss tokens, [N]."""
    by_sample: dict[int, np.ndarray] = {}
    for row in rows:
        values_N = values_of(row_tensors(row, device=device)).detach().float().cpu().numpy()
        sequence_N = row.sequence[row.loss_mask]
        by_sample |= {int(s): values_N[sequence_N == place] for place, s in enumerate(row.sample_index)}
    return np.stack([by_sample[index] for index in sorted(by_sample)])


def model_logprobs(model: PreTrainedModel, rows: Sequence[PackedRow]) -> np.ndarray:
    """By the trainer's own function. With gradients on, layers are computed as they are in training."""
    return row_values(rows, model.device, lambda row: token_logprobs(model, row)[0])


@torch.no_grad()
def head_rounding(model: PreTrainedModel, rows: Sequence[PackedRow]) -> np.ndarray:
    """What each log-probability gains when the logits are rounded to the model's own type, on hidden
    states computed once for both."""
    weight_VH = model.get_output_embeddings().weight

    def gains(row: RowTensors) -> torch.Tensor:
        hidden_NH = decoder_output(model, row).index_select(0, row.predictors_N)
        parts = []
        for hidden_CH, targets_C in zip(
            hidden_NH.split(chunk_tokens(weight_VH)),
            row.targets_N.split(chunk_tokens(weight_VH)),
            strict=True,
        ):
            rounded_C = _logprobs(nn.functional.linear(hidden_CH, weight_VH).float(), targets_C)
            parts.append(rounded_C - _logprobs(head_logits(hidden_CH, weight_VH), targets_C))
        return torch.cat(parts)

    return row_values(rows, model.device, gains)


@contextmanager
def exact_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it, a model with packed attention takes scores, softmax and sums in float32, whatever type its
    queries, keys and values have; the result is rounded to that type once."""
    AttentionInterface.register(EXACT_ATTENTION, _attend_exactly)
    model.set_attn_implementation(EXACT_ATTENTION)
    try:
        yield
    finally:
        use_packed_attention(model)


@torch.compiler.disable
def _attend_exactly(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    # In float32 no flash kernel applies, and this backend is plain matrix products around a softmax.
    with sdpa_kernel(SDPBackend.MATH):
        output, _ = packed_attention(
            module, query.float(), key.float(), value.float(), attention_mask, **options
        )
    return output.to(query.dtype), None


def _logprobs(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    return logits_CV.gather(1, targets_C[:, None])[:, 0] - logits_CV.logsumexp(-1)


def _sample(group: int, attempt: int, prompt_ids: np.ndarray, token_ids: np.ndarray) -> Sample:
    num_tokens = len(prompt_ids) + len(token_ids)
    loss_mask = np.arange(num_tokens) >= len(prompt_ids)
    return Sample(
        group=group,
        attempt=attempt,
        token_ids=np.concatenate([prompt_ids, token_ids]).astype(np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.where(loss_mask, 0, -1).astype(np.int32),
        advantages=np.zeros(num_tokens, dtype=np.float32),
        temperature=1.0,
        kv_versions=NO_KV,
    )
