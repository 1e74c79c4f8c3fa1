"""What a model thinks of given tokens: their log-probabilities, and the likeliest ones beside them.

In: the logits of a sequence's rows, chunk by chunk, as an executor computes them. Out: float32 log-probabilities, or
``TeacherScores``. Only [tokens, top_k] leaves the device; the logits of one chunk are all that is held.

Shape legend: T tokens, C rows of a chunk, K entries, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.data import masks
from headrace.errors import TaskError
from headrace.models import kept_sets
from headrace.types import SamplingMask, TeacherScores

RowLogits = Callable[[int, int], torch.Tensor]
"""``(start, stop)`` -> float32 [stop - start, V] of these rows of a sequence, to be asked for in order."""


def score_in_chunks(
    token_ids: np.ndarray,
    chunk_tokens: int,
    logits_of: RowLogits,
    *,
    temperature: float,
    mask: SamplingMask | None = None,
) -> np.ndarray:
    """float32 [T] logprobs of the tokens, entry 0 is 0. ``mask``: the tokens each was chosen among (None: all)."""
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    for start in range(0, len(token_ids) - 1, chunk_tokens):
        stop = min(start + chunk_tokens, len(token_ids) - 1)
        logits_TV = logits_of(start, stop)
        targets_T1 = torch.from_numpy(token_ids[start + 1 : stop + 1]).to(logits_TV.device).unsqueeze(1)
        logits_TV = logits_TV if temperature == 1.0 else logits_TV / temperature
        if mask is None:
            normaliser_T = logits_TV.logsumexp(dim=-1)
        else:
            if start == 0:
                _check_mask(mask, token_ids, vocab_size=logits_TV.shape[1])
            kept = masks.cut(mask, start + 1, stop + 1)
            normaliser_T = kept_sets.normaliser(logits_TV, kept_sets.kept_sets(kept, logits_TV.device))
        scored_T = logits_TV.gather(1, targets_T1).squeeze(1) - normaliser_T
        logprobs[start + 1 : stop + 1] = scored_T.cpu().numpy()
    return logprobs


def _check_mask(mask: SamplingMask, token_ids: np.ndarray, *, vocab_size: int) -> None:
    """Before any id of it is looked up, which a GPU would not survive."""
    wrong = masks.fault(mask, token_ids, vocab_size=vocab_size)
    if wrong is not None:
        raise TaskError(f"a sequence of {len(token_ids)} tokens cannot be scored over its kept sets: {wrong}")


def top_in_chunks(
    token_ids: np.ndarray,
    chunk_tokens: int,
    logits_of: RowLogits,
    *,
    temperature: float,
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

    logprobs = score_in_chunks(token_ids, chunk_tokens, watched, temperature=temperature)
    return TeacherScores(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)
