"""The trainer's own log-probabilities of a token sequence, to hold against an engine's.

In: a model and token ids. Out: float32 [T], entry 0 is 0, computed exactly as a training step would:
packed attention, chunked head, the temperature of the sampling.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.data.packing import pack
from headrace.models.packed_attention import use_packed_attention
from headrace.trainers.forward_check import probe_sample
from headrace.trainers.logprobs import row_tensors, token_logprobs


@torch.no_grad()
def trainer_logprobs(
    model: PreTrainedModel, token_ids: np.ndarray, *, temperature: float, dtype: str = "float32"
) -> np.ndarray:
    """Leaves the model with packed attention."""
    use_packed_attention(model)
    sample = probe_sample(token_ids, temperature=temperature)
    (row,) = pack([sample], row_tokens=sample.num_tokens)
    compute_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    logprobs, _ = token_logprobs(model, row_tensors(row, device=model.device), compute_dtype=compute_dtype)
    return np.append(np.float32(0.0), logprobs.cpu().numpy())
