"""Does the trainer compute this model right? Asked once, before the first step.

In: a model with any attention implementation. Out: nothing, or a ModelError that names the model. A packed
row of random tokens through the chunked head must give the log-probabilities of a plain forward of each
sequence alone, which catches layers that ignore packing and heads that scale their logits unknown to us.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.data.packing import pack
from headrace.errors import ModelError
from headrace.models.packed_attention import use_packed_attention
from headrace.models.routers import routers
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.types import NO_KV, Sample

LENGTHS = (7, 13, 4)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Far above rounding, far below what a missing scale or a leak between sequences does."""


@torch.no_grad()
def check_forward(model: PreTrainedModel) -> None:
    """Leaves the model with packed attention."""
    vocab_size = model.get_input_embeddings().num_embeddings
    rng = np.random.default_rng(0)
    samples = [probe_sample(rng.integers(0, vocab_size, length)) for length in LENGTHS]
    model.set_attn_implementation("eager")
    plain = torch.cat([plain_logprobs(model, sample.token_ids) for sample in samples])
    use_packed_attention(model)
    (row,) = pack(samples, row_tokens=sum(LENGTHS))
    packed, _ = token_logprobs(model, row_tensors(row, device=model.device))
    gaps = (packed - plain).abs()
    # Where two experts score alike, rounding decides which is used: of a mixture the usual token is asked.
    gap = float(gaps.median() if routers(model) else gaps.max())
    if not gap < TOLERANCE[model.dtype]:
        raise ModelError(
            f"model: {type(model).__name__} gives other log-probabilities in a packed row than alone "
            f"(by {gap:.2g}), so it would be trained wrongly; choose another model"
        )


def plain_logprobs(model: PreTrainedModel, token_ids: np.ndarray) -> torch.Tensor:
    """float32 [T - 1] of tokens 1 to T - 1 given those before them, by the model's own forward."""
    ids = torch.from_numpy(token_ids.astype(np.int64)).to(model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def probe_sample(token_ids: np.ndarray, *, temperature: float = 1.0) -> Sample:
    """A sample whose every predicted token counts."""
    num_tokens = token_ids.shape[0]
    return Sample(
        group=0,
        attempt=0,
        token_ids=token_ids.astype(np.int32),
        loss_mask=np.arange(num_tokens) > 0,
        behavior_logprobs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.zeros(num_tokens, dtype=np.int32),
        advantages=np.zeros(num_tokens, dtype=np.float32),
        temperature=temperature,
        kv_versions=NO_KV,
    )
