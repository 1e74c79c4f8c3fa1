"""Who needs how many bytes where, and for what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Purpose = Literal[
    "weights, float32",
    "weights, computed with",
    "weights, gathered",
    "reference",
    "gradients",
    "moments",
    "activations",
    "head and logits",
    "slopes of logits",
    "published weights",
    "keys and values",
    "passes",
    "between blocks",
    "process",
]


@dataclass(frozen=True, slots=True)
class Use:
    process: str
    place: str
    """``GPU 0``, ``GPU 1``, ... or ``host``."""
    purpose: Purpose
    num_bytes: int


def total(uses: Iterable[Use], *, place: str | None = None, process: str | None = None) -> int:
    """Bytes of those uses that are in this place and of this process, where one is given."""
    return sum(use.num_bytes for use in uses if place in (None, use.place) and process in (None, use.process))
