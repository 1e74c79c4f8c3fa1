"""The truncated draw of a device by the plain sampler: what the kernels must return, on any device.

In and out: the same memory as the kernels'. It waits for the device.

Shape legend: R rows of the logits, V vocabulary, W words of 32 bits.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from headrace.engines.sampler import SamplerRows, sample
from headrace.kernels.truncation import WORD_BITS, TruncatedDraws, TruncatedRows


def draw_truncated(logits_RV: torch.Tensor, rows: TruncatedRows, draws: TruncatedDraws) -> None:
    settings = SamplerRows(
        temperature=rows.temperatures.cpu().numpy(),
        top_k=rows.top_k.cpu().numpy(),
        top_p=rows.top_p.cpu().numpy(),
        min_p=rows.min_p.cpu().numpy(),
        seed_key=rows.seed_keys.cpu().numpy().view(np.uint64),
        position=rows.positions.cpu().numpy(),
    )
    drawn = sample(logits_RV[rows.sources].float(), settings)
    draws.token_ids.copy_(torch.from_numpy(drawn.token_ids))
    draws.logprobs.copy_(torch.from_numpy(drawn.logprobs))
    starts, everything = rows.list_starts.tolist(), np.arange(logits_RV.shape[1], dtype=np.int32)
    for row, (start, end) in enumerate(pairwise(starts)):
        kept = drawn.kept.get(row, everything)
        listed = kept[: end - start]
        draws.counts[row] = len(kept)
        draws.listed[start : start + len(listed)].copy_(torch.from_numpy(listed))
        draws.kept_words[row].copy_(_as_bits(kept, draws.kept_words.shape[1]))


def _as_bits(token_ids: np.ndarray, num_words: int) -> torch.Tensor:
    """int32 [W] with the bits of these tokens set."""
    bits = np.zeros(num_words * WORD_BITS, dtype=bool)
    bits[token_ids] = True
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
