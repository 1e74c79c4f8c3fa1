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

from headrace.data import masks
from headrace.engines.held_weights import HeldWeights
from headrace.engines.route_table import RoutedRows
from headrace.engines.sampler import Drawn
from headrace.engines.scheduler import Work
from headrace.engines.sequences import SlotTable
from headrace.errors import TaskError
from headrace.models import kept_sets
from headrace.types import SamplingMask, TeacherScores


def score_in_chunks(
    token_ids: np.ndarray,
    chunk_tokens: int,
    temperature: float,
    logits_of: Callable[[int, int], torch.Tensor],
    mask: SamplingMask | None = None,
) -> np.ndarray:
    """float32 [T] logprobs of the tokens, entry 0 is 0; ``logits_of(start, stop)`` gives float32 [stop - start, V]
    of these rows, and is asked for them in order. ``mask``: the tokens each was chosen among (None: all)."""
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


class Flight(Protocol):
    """One launched pass."""

    slots: np.ndarray
    """int64 [R], the slots that draw a token, in the order of the draws."""
    routed: list[RoutedRows]
    """Of all its rows, once it has landed; empty where routes are not recorded."""

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

    def score(
        self,
        token_ids: np.ndarray,
        blocks: list[int],
        temperature: float,
        adapter: int,
        mask: SamplingMask | None = None,
    ) -> np.ndarray:
        """float32 [T] logprobs of the tokens, entry 0 is 0; ``blocks`` hold their keys and values, ``mask`` the
        tokens they were chosen among."""
        ...

    def score_top(
        self, token_ids: np.ndarray, blocks: list[int], temperature: float, adapter: int, top_k: int
    ) -> TeacherScores:
        """As ``score``, with the ``top_k`` likeliest tokens of every position."""
        ...
