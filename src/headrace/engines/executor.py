"""The seam between deciding what a pass computes and computing it.

The engine hands an ``Executor`` one pass of work at a time and gets back a ``Flight``: the slots that draw
a token in it, and a wait for what was drawn. There is one scheduler, one table of slots and one meaning of a
draw; executors differ in where and when they compute. A pipelined one returns before the pass is done,
and the engine launches the next pass before it asks for the drawn tokens of the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from headrace.engines.held_weights import HeldWeights
from headrace.engines.sampler import Drawn
from headrace.engines.scheduler import Work
from headrace.engines.sequences import SlotTable
from headrace.types import TeacherScores


def score_in_chunks(
    token_ids: np.ndarray,
    chunk_tokens: int,
    temperature: float,
    logits_of: Callable[[int, int], torch.Tensor],
) -> np.ndarray:
    """float32 [T] logprobs of the tokens, entry 0 is 0; ``logits_of(start, stop)`` gives float32 [stop - start, V]
    of these rows, and is asked for them in order."""
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    for start in range(0, len(token_ids) - 1, chunk_tokens):
        stop = min(start + chunk_tokens, len(token_ids) - 1)
        logits_TV = logits_of(start, stop)
        targets_T1 = torch.from_numpy(token_ids[start + 1 : stop + 1]).to(logits_TV.device).unsqueeze(1)
        logits_TV = logits_TV if temperature == 1.0 else logits_TV / temperature
        scored_T = logits_TV.gather(1, targets_T1).squeeze(1) - logits_TV.logsumexp(dim=-1)
        logprobs[start + 1 : stop + 1] = scored_T.cpu().numpy()
    return logprobs


class Flight(Protocol):
    """One launched pass."""

    slots: np.ndarray
    """int64 [R], the slots that draw a token, in the order of the draws."""

    def wait(self) -> Drawn:
        """What was drawn, once it is on the host. Asked for once, in the order of launches."""
        ...


class Executor(Protocol):
    """Computes passes over one model on one device, in the order they are launched."""

    table: SlotTable
    num_blocks: int
    """Blocks of the key-value memory, the scratch block included."""
    limit_tokens: int
    """Tokens a sequence may have."""
    pipelined: bool
    """Whether ``launch`` returns before the pass is done."""
    held: HeldWeights
    """What it computes with; changed between two passes alone."""

    def launch(self, work: Work) -> Flight:
        """Compute the work's rows under the present weights. The table is read before this returns, not
        later; a decoding row's token is the one drawn last for its slot, booked or not."""
        ...

    def score(self, token_ids: np.ndarray, blocks: list[int], temperature: float, adapter: int) -> np.ndarray:
        """float32 [T] logprobs of the tokens, entry 0 is 0; ``blocks`` hold their keys and values."""
        ...

    def score_top(
        self, token_ids: np.ndarray, blocks: list[int], temperature: float, adapter: int, top_k: int
    ) -> TeacherScores:
        """As ``score``, with the ``top_k`` likeliest tokens of every position."""
        ...
