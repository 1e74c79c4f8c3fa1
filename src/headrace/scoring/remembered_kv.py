"""Texts that are read on from where they were left, several in one forward pass.

In: readings, each with a text, what of it was read, and the keys and values of that. Out: the hidden states of the next
tokens of each, whose keys and values are now remembered too. Memories of different lengths stand in one batch with
padding before the shorter ones, new tokens with padding behind: between a memory and what continues it there is never a
gap, so distances within a text, which windowed layers count, are right.

Shape legend: B readings, L layers, A key-value heads, D head width, M longest memory, N new tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache


@dataclass(slots=True)
class Reading:
    """One attempt as far as it was read."""

    text: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32, what there is to read."""
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64, where in the text its steps are judged."""
    num_read: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    """What was found at the rows judged so far."""
    kv: torch.Tensor | None = None
    """[L, 2, A, num_read, D]; None: nothing was read."""

    @property
    def num_new(self) -> int:
        return len(self.text) - self.num_read

    def is_start_of(self, text: np.ndarray, wanted: np.ndarray) -> bool:
        """Whether everything read so far is the beginning of ``text``, and of the ``wanted`` rows each was judged or
        is still to be read: steps of a turn before are others, though its text is the same."""
        known = self.text[: self.num_read]
        is_same = np.array_equal(known, text[: self.num_read])
        return is_same and all(row >= self.num_read or row in self.scores for row in wanted.tolist())


def read_on(backbone: Any, readings: Sequence[Reading], most_tokens: int) -> list[torch.Tensor]:
    """The hidden states, [N, H], of up to ``most_tokens`` new tokens of each reading."""
    device = backbone.device
    memories = [reading.num_read for reading in readings]
    news = [min(reading.num_new, most_tokens) for reading in readings]
    longest, width = max(memories), max(news)
    ids_BN = torch.zeros(len(readings), width, dtype=torch.long)
    places_BN = torch.zeros(len(readings), width, dtype=torch.long)
    real_BT = torch.zeros(len(readings), longest + width, dtype=torch.long)
    for row, (reading, memory, new) in enumerate(zip(readings, memories, news, strict=True)):
        ids_BN[row, :new] = torch.from_numpy(reading.text[memory : memory + new].astype(np.int64))
        places_BN[row, :new] = torch.arange(memory, memory + new)
        real_BT[row, longest - memory : longest + new] = 1
    cache = _side_by_side(readings, longest)
    output = backbone(
        input_ids=ids_BN.to(device),
        position_ids=places_BN.to(device),
        attention_mask=real_BT.to(device),
        past_key_values=cache,
        use_cache=True,
    )
    _remember(readings, news, cache, longest)
    return [output.last_hidden_state[row, :new] for row, new in enumerate(news)]


def _side_by_side(readings: Sequence[Reading], longest: int) -> DynamicCache:
    """One cache of all memories, which end together."""
    # Whole for every layer, also a windowed one: its mask hides what is too far away.
    cache = DynamicCache()
    known = next((reading.kv for reading in readings if reading.kv is not None), None)
    if known is None:
        return cache
    layers, _, heads, _, head_width = known.shape
    joined = known.new_zeros(layers, 2, len(readings), heads, longest, head_width)
    for row, reading in enumerate(readings):
        if reading.kv is not None:
            joined[:, :, row, :, longest - reading.num_read :] = reading.kv
    for layer in range(layers):
        cache.update(joined[layer, 0], joined[layer, 1], layer)
    return cache


def _remember(readings: Sequence[Reading], news: Sequence[int], cache: DynamicCache, longest: int) -> None:
    fresh = torch.stack(
        [torch.stack((layer.keys[:, :, longest:], layer.values[:, :, longest:])) for layer in cache.layers]
    )
    for row, (reading, new) in enumerate(zip(readings, news, strict=True)):
        own = fresh[:, :, row, :, :new]
        reading.kv = own.clone() if reading.kv is None else torch.cat([reading.kv, own], dim=3)
        reading.num_read += new
