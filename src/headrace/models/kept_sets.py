"""Recorded kept sets on a device, and normalisers over them.

In: a ``SamplingMask`` with a row for each token. Out: the same sets as flat lists of (token, id), which pick their
logits out of [tokens, vocabulary] and put gradients back. Lists are padded only on the way through a reduction,
one chunk of tokens at a time and no wider than that chunk's largest set. Engine and trainer both use this, so a set
means the same on both sides.

Legend: C tokens of a chunk, V vocabulary, S ids over all sets, K ids of the largest set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.models.uploads import to_device
from headrace.types import SamplingMask

_OUTSIDE = torch.finfo(torch.float32).min
"""Stands where a set has ended: finite, so that its probability times itself is 0 and not undefined."""


@dataclass(frozen=True, slots=True)
class KeptSets:
    """The kept sets of some tokens. What decides shapes is known to the host, so that nothing waits for a GPU."""

    offsets: np.ndarray
    """int64 [C + 1], on the host."""
    ids_S: torch.Tensor
    tokens_S: torch.Tensor
    places_S: torch.Tensor
    """int64 on the device, as ``ids_S``: the token each id belongs to, and its place in that token's set."""

    @property
    def counts(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def all_cut(self) -> bool:
        """Whether no token was drawn from the whole vocabulary."""
        return bool((self.counts > 0).all())

    def chunk(self, tokens: slice) -> KeptSets:
        """The sets of a run of tokens, which are counted from 0 again."""
        start, stop, _ = tokens.indices(len(self.offsets) - 1)
        offsets = self.offsets[start : stop + 1]
        ids = slice(int(offsets[0]), int(offsets[-1]))
        return KeptSets(offsets - offsets[0], self.ids_S[ids], self.tokens_S[ids] - start, self.places_S[ids])

    def free_and_cut(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64, the tokens drawn from the whole vocabulary, and the others."""
        is_free = self.counts == 0
        device = self.ids_S.device
        free, cut = (to_device(np.flatnonzero(which), device) for which in (is_free, ~is_free))
        return free, cut

    def only_cut(self) -> KeptSets:
        """Without the tokens drawn from the whole vocabulary."""
        counts = self.counts
        return _on_device(counts[counts > 0], self.ids_S)

    def pick(self, values_CV: torch.Tensor) -> torch.Tensor:
        """[S], the entries of the sets."""
        return values_CV[self.tokens_S, self.ids_S]

    def put(self, values_S: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
        """[C, V] with these entries, and zero outside the sets."""
        out_CV = values_S.new_zeros(len(self.offsets) - 1, vocab_size)
        return out_CV.index_put_((self.tokens_S, self.ids_S), values_S)

    def padded(self, values_S: torch.Tensor) -> torch.Tensor:
        """[C, K], each token's entries from the left."""
        shape = (len(self.offsets) - 1, max(int(self.counts.max(initial=0)), 1))
        return values_S.new_full(shape, _OUTSIDE).index_put_((self.tokens_S, self.places_S), values_S)


def kept_sets(mask: SamplingMask, device: torch.device | str) -> KeptSets:
    ids_S = to_device(mask.token_ids.astype(np.int64), device)
    return _on_device(np.diff(mask.offsets), ids_S)


def _on_device(counts: np.ndarray, ids_S: torch.Tensor) -> KeptSets:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    tokens = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(tokens)) - offsets[:-1][tokens]
    device = ids_S.device
    return KeptSets(offsets, ids_S, to_device(tokens, device), to_device(places, device))


def normaliser(scaled_CV: torch.Tensor, kept: KeptSets) -> torch.Tensor:
    """[C], log of the sum of exponentials over each token's set; over the whole vocabulary where that is empty."""
    whole_C = scaled_CV.logsumexp(-1)
    is_cut_C = to_device(kept.counts > 0, scaled_CV.device)
    return torch.where(is_cut_C, kept.padded(kept.pick(scaled_CV)).logsumexp(-1), whole_C)
