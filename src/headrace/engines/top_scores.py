"""The likeliest tokens of every position of a given sequence, beside the log-probabilities of its own.

In: the rows of a sequence's logits, chunk by chunk, as an executor computes them. Out: ``TeacherScores``. Only
[tokens, top_k] leaves the device; the logits of one chunk are all that is held.

Shape legend: C rows of a chunk, K entries, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.engines.executor import score_in_chunks
from headrace.types import TeacherScores


def top_in_chunks(
    token_ids: np.ndarray,
    chunk_tokens: int,
    temperature: float,
    logits_of: Callable[[int, int], torch.Tensor],
    top_k: int,
) -> TeacherScores:
    """``score_in_chunks``, with the ``top_k`` likeliest tokens that each token was one choice among."""
    top_ids = np.zeros((len(token_ids), top_k), dtype=np.int32)
    top_logprobs = np.full((len(token_ids), top_k), -np.inf, dtype=np.float32)

    def watched(start: int, stop: int) -> torch.Tensor:
        logits_CV = logits_of(start, stop)
        scaled_CV = logits_CV if temperature == 1.0 else logits_CV / temperature
        top_CK, ids_CK = scaled_CV.topk(min(top_k, scaled_CV.shape[1]), dim=-1)
        place = np.s_[start + 1 : stop + 1, : top_CK.shape[1]]
        top_ids[place] = ids_CK.int().cpu().numpy()
        top_logprobs[place] = (top_CK - scaled_CV.logsumexp(dim=-1, keepdim=True)).cpu().numpy()
        return logits_CV

    logprobs = score_in_chunks(token_ids, chunk_tokens, temperature, watched)
    return TeacherScores(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)
