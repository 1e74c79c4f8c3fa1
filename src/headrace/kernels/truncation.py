"""What a truncated draw reads and writes besides logits. No kernel is here, so that it imports everywhere.

A kept set leaves the draw in two forms: as bits, one a token of the vocabulary, and as a list of rising token ids
in the room that the caller gave the row. ``counts`` tells whether the list holds all of it.

Shape legend: Q truncated rows, W words of 32 bits, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class TruncatedRows:
    """The rows to draw, and how each is cut."""

    sources: torch.Tensor
    """int64 [Q], which row of the logits each is."""
    seed_keys: torch.Tensor
    """int64 [Q], views of uint64 keys."""
    positions: torch.Tensor
    """int64 [Q]."""
    temperatures: torch.Tensor
    """float32 [Q]; 0 is greedy, and nothing is cut then."""
    top_k: torch.Tensor
    """int64 [Q]; 0 keeps every token."""
    top_p: torch.Tensor
    min_p: torch.Tensor
    """float32 [Q]; 1 and 0 cut nothing."""
    list_starts: torch.Tensor
    """int64 [Q + 1]: the kept ids of row q are listed from entry q on, and at most up to the next one."""


@dataclass(frozen=True, slots=True)
class TruncatedDraws:
    """Memory that a draw fills."""

    token_ids: torch.Tensor
    """int32 [Q]."""
    logprobs: torch.Tensor
    """float32 [Q], of the kept tokens' distribution."""
    counts: torch.Tensor
    """int32 [Q], kept tokens; may exceed the room for the list."""
    listed: torch.Tensor
    """int32, kept ids in rising order, as many as there is room for; the rest is left as it was."""
    kept_words: torch.Tensor
    """int32 [Q, W]; bit i of word w is token 32 * w + i."""


def new_draws(num_rows: int, num_listed: int, vocab_size: int, device: torch.device) -> TruncatedDraws:
    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return TruncatedDraws(
        token_ids=integers(num_rows),
        logprobs=torch.empty(num_rows, dtype=torch.float32, device=device),
        counts=integers(num_rows),
        listed=integers(num_listed),
        kept_words=integers(num_rows, -(-vocab_size // WORD_BITS)),
    )
