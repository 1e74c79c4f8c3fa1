"""A short supervised start from example answers, for models that cannot earn a first reward.

In: a model and (prompt ids, answer ids) pairs. Out: the same model, trained in place on the answer tokens
alone, and the loss of every step. It goes through the packing and the chunked log-probabilities of the
RL trainer. Batches follow the seed: each pass over the pairs is a new shuffle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.data.packing import pack
from headrace.errors import ConfigError, TrainingError
from headrace.models.packed_attention import use_packed_attention
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.trainers.optim import build_adamw
from headrace.types import NO_KV, Sample

Pair = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]


def warm_start(
    model: PreTrainedModel,
    pairs: Sequence[Pair],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int = 0,
    row_tokens: int = 16384,
    grad_clip: float = 1.0,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Mean negative log-likelihood of the answer tokens, by step; ``on_step`` hears (step, loss)."""
    if not pairs:
        raise ConfigError("warm start: there are no example answers; give at least one (prompt, answer) pair")
    samples = [_answer_sample(index, *pair) for index, pair in enumerate(pairs)]
    before = model.config._attn_implementation
    use_packed_attention(model)
    model.eval()
    optimizer = build_adamw(model, learning_rate=learning_rate)
    losses = []
    for step, indices in zip(range(1, steps + 1), _batches(len(samples), batch_size, seed), strict=False):
        losses.append(_train(model, optimizer, [samples[i] for i in indices], row_tokens, grad_clip))
        if not np.isfinite(losses[-1]):
            raise TrainingError(f"warm start: the loss of step {step} is not finite; lower learning_rate")
        if on_step is not None:
            on_step(step, losses[-1])
    model.set_attn_implementation(before)
    return losses


def _train(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    row_tokens: int,
    grad_clip: float,
) -> float:
    rows = pack(samples, row_tokens=row_tokens)
    num_loss_tokens = sum(int(row.loss_mask.sum()) for row in rows)
    total = 0.0
    for row in rows:
        logprobs_N, _ = token_logprobs(model, row_tensors(row, device=model.device))
        loss = -logprobs_N.sum() / num_loss_tokens
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    if np.isfinite(total):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def _batches(num_samples: int, batch_size: int, seed: int) -> Iterator[np.ndarray]:
    """Endless batches of indices, every pass in a new order."""
    rng = np.random.default_rng(seed)
    waiting = np.zeros(0, dtype=np.int64)
    while True:
        while waiting.size < batch_size:
            waiting = np.concatenate([waiting, rng.permutation(num_samples)])
        yield waiting[:batch_size]
        waiting = waiting[batch_size:]


def _answer_sample(
    index: int, prompt_ids: Sequence[int] | np.ndarray, answer_ids: Sequence[int] | np.ndarray
) -> Sample:
    prompt, answer = np.asarray(prompt_ids, dtype=np.int32), np.asarray(answer_ids, dtype=np.int32)
    if answer.size == 0 or prompt.size == 0:
        raise ConfigError(f"warm start: pair {index} has an empty prompt or answer; leave it out")
    num_tokens = prompt.size + answer.size
    return Sample(
        group=index,
        attempt=0,
        token_ids=np.concatenate([prompt, answer]),
        loss_mask=np.arange(num_tokens) >= prompt.size,
        behavior_logprobs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.full(num_tokens, -1, dtype=np.int32),
        advantages=np.zeros(num_tokens, dtype=np.float32),
        temperature=1.0,
        kv_versions=NO_KV,
    )
