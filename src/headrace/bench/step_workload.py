"""What a training step is given in benchmarks: groups of attempts of equal lengths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    num_groups: int = 64
    group_size: int = 8
    prompt_tokens: int = 256
    completion_tokens: int = 512
