"""What both sides of the rollout benchmark are asked for.

In: the size of the workload and a seed. Out: prompts, lengths and requests, the same wherever they are made. A sample
of several turns is asked for anew after each: what was sampled, and tokens it did not write, follow its prompt.

Shape legend: N samples, U turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headrace.types import Request, Sampling


@dataclass(frozen=True)
class Workload:
    num_prompts: int = 64
    group_size: int = 8
    prompt_tokens: int = 256
    mean_tokens: float = 483.0
    """Of a sample, all turns together; at most ``cap_tokens``."""
    cap_tokens: int = 2048
    seed: int = 0
    rounds: int = 1
    """So many times the prompts that run at once: the others wait, and begin as samples end."""
    turns: int = 1
    """Of lengths drawn one by one, so that samples of many turns differ less in length."""
    reply_tokens: int = 64
    """Between two turns."""

    @property
    def at_once(self) -> int:
        """Samples that run together."""
        return self.num_prompts * self.group_size

    def prompts(self, vocab_size: int, repeat: int = 0) -> np.ndarray:
        """int32 [rounds * prompts, tokens], others in every repeat: an engine may remember those of the last."""
        rng = np.random.default_rng((self.seed, repeat))
        shape = self.rounds * self.num_prompts, self.prompt_tokens
        return rng.integers(0, vocab_size, shape).astype(np.int32)

    @cached_property
    def lengths_UN(self) -> np.ndarray:
        """int64, sampled tokens of each turn: log-normal, cut at the cap, with the wanted mean."""
        shape = self.turns, self.rounds * self.at_once
        draws_UN = np.random.default_rng(self.seed + 1).standard_normal(shape)
        mean, cap = self.mean_tokens / self.turns, self.cap_tokens // self.turns
        low, high = 1.0, float(cap)
        for _ in range(60):
            middle = (low + high) / 2
            found = np.clip(np.exp(draws_UN * 0.9) * middle, 1, cap).mean()
            low, high = (middle, high) if found < mean else (low, middle)
        return np.clip(np.round(np.exp(draws_UN * 0.9) * low), 1, cap).astype(np.int64)

    @property
    def num_tokens(self) -> int:
        """Sampled in all."""
        return int(self.lengths_UN.sum())

    def requests(self, vocab_size: int, repeat: int) -> list[Request]:
        """The first turns of all samples."""
        prompts = self.prompts(vocab_size, repeat)
        return [
            self._request(prompts[i // self.group_size], repeat, 0, i)
            for i in range(self.lengths_UN.shape[1])
        ]

    def next_request(self, request: Request, sampled: np.ndarray, vocab_size: int) -> Request | None:
        """The turn that follows one of these requests; None after the last."""
        repeat, turn, sample = (int(number) for number in request.id.split("-"))
        if turn + 1 == self.turns:
            return None
        rng = np.random.default_rng((self.seed, repeat, turn, sample))
        reply = rng.integers(0, vocab_size, self.reply_tokens)
        prompt = np.concatenate((request.prompt_ids, sampled, reply)).astype(np.int32)
        return self._request(prompt, repeat, turn + 1, sample)

    def _request(self, prompt_ids: np.ndarray, repeat: int, turn: int, sample: int) -> Request:
        return Request(
            id=f"{repeat}-{turn}-{sample}",
            prompt_ids=prompt_ids,
            sampling=Sampling(max_tokens=int(self.lengths_UN[turn, sample])),
            seed=(repeat * self.turns + turn) * 100_000 + sample,
        )
