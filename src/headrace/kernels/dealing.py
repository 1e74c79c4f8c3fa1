"""The key-value rows of a decode pass, dealt out to the programs that read them.

In: how many key-value rows each row of the pass reads by itself. Out: a list of spans, each with the row it belongs to,
a row's spans one behind the other. Where spans of up to twice an even share all run at once, they are as short as they
can be while they do, so that no program is still at work long after the others; a row that is far longer than the rest
has many, and nobody else more for it. Where even those would not, as with more rows than run at once, no span is longer
than an even share: what begins late should be short.

The list is made before a pass is launched and brought with its inputs, so a captured launch has room for the longest
list there can be, and programs behind the end of a list find nothing to do after all others have begun.

Shape legend: B rows of a pass, N entries there is room for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

MIN_SPAN = 256
"""Key-value rows below which a span is not worth a program of its own."""
MAX_SPANS = 32
"""Of one row: whoever is last with it joins them one after the other."""
_STRETCHES = np.linspace(1.0, 2.0, 17)[:, None]
"""Of an even share of the pass, tried as the longest span, shortest first."""


class Spans(NamedTuple):
    """As the kernels are told of them, int32 on their device."""

    rows: torch.Tensor
    """[N], the row of the pass each span belongs to; -1 behind the last span."""
    firsts: torch.Tensor
    """[B + 1], where in ``rows`` the spans of each row begin, and where those of the last row end."""


def most_spans(num_rows: int, num_at_once: int) -> int:
    """Entries there must be room for: ``deal_out`` makes no more."""
    return num_rows + num_at_once


def deal_out(own_B: np.ndarray, num_at_once: int) -> np.ndarray:
    """int64 [B], spans of each row, of which so many run at once; ``own_B``: key-value rows it reads by itself. A row
    of padding has a span too, which ends as soon as it begins."""
    even = max(float(MIN_SPAN), own_B.sum() / max(1, num_at_once))
    if np.count_nonzero(own_B) > num_at_once:
        # However long spans are, they do not all run at once.
        return np.ceil(own_B / even).clip(1, MAX_SPANS).astype(np.int64)
    counts = np.ceil(own_B / (even * _STRETCHES)).clip(1, MAX_SPANS).astype(np.int64)
    fits = counts[:, own_B > 0].sum(1) <= num_at_once
    return counts[int(fits.argmax())]


def spans_of_rows(own_B: np.ndarray, num_at_once: int, device: torch.device) -> Spans:
    """The list of a pass of its own."""
    rows_N, firsts = (
        np.zeros(most_spans(len(own_B), num_at_once), np.int32),
        np.zeros(len(own_B) + 1, np.int32),
    )
    write_list(deal_out(own_B, num_at_once), rows_N, firsts)
    return Spans(torch.from_numpy(rows_N).to(device), torch.from_numpy(firsts).to(device))


def write_list(counts_B: np.ndarray, rows_N: np.ndarray, firsts: np.ndarray) -> None:
    """Put down the list in arrays of the length it has in ``Spans``."""
    firsts[0] = 0
    np.cumsum(counts_B, out=firsts[1:])
    listed = int(firsts[-1])
    rows_N[:listed] = np.repeat(np.arange(len(counts_B)), counts_B)
    rows_N[listed:] = -1
