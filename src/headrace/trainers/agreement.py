"""The trainer's own log-probabilities of a token sequence, to hold against an engine's.

In: a model, token ids and the sets they were drawn from. Out: float32 [T], entry 0 is 0, computed exactly as a
training step would: packed attention, the sum between layers in float32, chunked head, the temperature of the sampling.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.data.packing import pack
from headrace.models.float_residual import keep_float_residual
from headrace.models.packed_attention import use_packed_attention
from headrace.trainers.forward_check import probe_sample
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.trainers.master_weights import compute_copy
from headrace.types import SamplingMask


@torch.no_grad()
def trainer_logprobs(
    model: PreTrainedModel,
    token_ids: np.ndarray,
    *,
    temperature: float,
    dtype: str = "float32",
    mask: SamplingMask | None = None,
) -> np.ndarray:
    """Leaves a float32 model as trainers have it; another ``dtype`` is computed with a copy. ``mask`` has a row for
    each token."""
    keep_float_residual(model)
    if dtype == "bfloat16":
        model = compute_copy(model, torch.bfloat16)
    use_packed_attention(model)
    sample = replace(probe_sample(token_ids, temperature=temperature), sampling_mask=mask)
    (row,) = pack([sample], row_tokens=sample.num_tokens)
    logprobs, _ = token_logprobs(model, row_tensors(row, device=model.device))
    return np.append(np.float32(0.0), logprobs.cpu().numpy())
