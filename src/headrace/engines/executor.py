"""The seam between deciding what a pass computes and computing it.

The engine hands an ``Executor`` one pass of work at a time and gets back a ``Flight``: the slots that draw
a token in it, and a wait for what was drawn. There is one scheduler, one table of slots and one meaning of a
draw; executors differ in where and when they compute. A pipelined one returns before the pass is done,
and the engine launches the next pass before it asks for the drawn tokens of the last.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headrace.engines.held_weights import HeldWeights
from headrace.engines.route_table import RoutedRows
from headrace.engines.sampler import Drawn
from headrace.engines.scheduler import Work
from headrace.engines.scores import RowLogits
from headrace.engines.sequences import SlotTable


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
    vocab_size: int
    """Token ids the model knows."""
    pipelined: bool
    """Whether ``launch`` returns before the pass is done."""
    prompts_apart: bool
    """Whether prompts are a pass of their own, beside that of the decoding rows."""
    held: HeldWeights
    """What it computes with; changed between two passes alone."""

    def launch(self, work: Work) -> Flight:
        """Compute the work's rows under the present weights. The table is read before this returns, not
        later; a decoding row's token is the one drawn last for its slot, booked or not."""
        ...

    def scored_logits(self, token_ids: np.ndarray, blocks: list[int], adapter: int) -> RowLogits:
        """The logits of a given sequence's rows, a chunk at a time; ``blocks`` hold its keys and values."""
        ...
