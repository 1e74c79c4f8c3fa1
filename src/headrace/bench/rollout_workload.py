"""What both sides of the rollout benchmark are asked for.

In: the size of the workload and a seed. Out: prompts, lengths and requests, the same wherever they are made.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from headrace.types import Request, Sampling


@dataclass(frozen=True, slots=True)
class Workload:
    num_prompts: int = 64
    group_size: int = 8
    prompt_tokens: int = 256
    mean_tokens: float = 483.0
    cap_tokens: int = 2048
    seed: int = 0
    rounds: int = 1
    """So many times the prompts that run at once: the others wait, and begin as samples end."""

    @property
    def at_once(self) -> int:
        """Samples that run together."""
        return self.num_prompts * self.group_size

    def prompts(self, vocab_size: int, repeat: int = 0) -> np.ndarray:
        """int32 [rounds * prompts, tokens], others in every repeat: an engine may remember those of the last."""
        rng = np.random.default_rng((self.seed, repeat))
        shape = self.rounds * self.num_prompts, self.prompt_tokens
        return rng.integers(0, vocab_size, shape).astype(np.int32)

    def lengths(self) -> np.ndarray:
        """int64 [rounds * prompts * group], log-normal, cut at the cap, with the wanted mean."""
        draws = np.random.default_rng(self.seed + 1).standard_normal(self.rounds * self.at_once)
        low, high = 1.0, float(self.cap_tokens)
        for _ in range(60):
            middle = (low + high) / 2
            mean = np.clip(np.exp(draws * 0.9) * middle, 1, self.cap_tokens).mean()
            low, high = (middle, high) if mean < self.mean_tokens else (low, middle)
        return np.clip(np.round(np.exp(draws * 0.9) * low), 1, self.cap_tokens).astype(np.int64)

    def digest(self) -> str:
        """The same where the same is asked for."""
        found = hashlib.sha256(self.prompts(1000).tobytes())
        found.update(self.lengths().tobytes())
        return found.hexdigest()

    def requests(self, vocab_size: int, repeat: int) -> list[Request]:
        prompts, lengths = self.prompts(vocab_size, repeat), self.lengths()
        return [
            Request(
                id=f"{repeat}-{i}",
                prompt_ids=prompts[i // self.group_size],
                sampling=Sampling(max_tokens=int(length)),
                seed=repeat * 100_000 + i,
            )
            for i, length in enumerate(lengths)
        ]
