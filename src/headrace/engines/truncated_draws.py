"""The host's half of a truncated draw: what goes to the device with it, and how kept sets come back.

In: the slots of a pass whose distribution is cut (top-k, top-p, min-p). Out: their rows in device memory, and
after the draw the kept ids of each row. Sets travel with the flight as lists, in room that is fixed before the
draw: ``top_k`` ids, or ``LISTED_TOKENS`` where that is less or there is no top-k. A set that outgrew its list is
read from its bits, which stay on the device until the flight has landed; that reading waits for no later pass.
So every set is recorded whole, and the sampled token is in it. On a GPU the kernels of these draws are compiled
when the first such row comes.

Shape legend: Q truncated rows.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from headrace.engines.sequences import SlotTable
from headrace.kernels.truncation import TruncatedDraws, TruncatedRows
from headrace.models.uploads import to_pinned

LISTED_TOKENS = 1024
"""Ids of one set that travel with a flight. Sets of a trained model are nearly always smaller."""
_ALIGNED = 4


@dataclass(frozen=True, slots=True)
class CutRows:
    """Truncated rows of one pass, on both sides."""

    rows: TruncatedRows
    slots: torch.Tensor
    """int64 [Q], on the device."""
    list_starts: np.ndarray
    """int64 [Q + 1]."""


def cut_rows(
    table: SlotTable, slots: np.ndarray, sources: np.ndarray, vocab_size: int, device: torch.device
) -> CutRows:
    """The next draw of these slots, from the rows of logits that ``sources`` names; brought in one copy."""
    count = len(slots)
    top_k = table.top_k[slots]
    rooms = np.minimum(np.where(top_k > 0, top_k, vocab_size), min(LISTED_TOKENS, vocab_size))
    # Room for one more entry, and every row of the copy begins where kernels read it fastest.
    width = (count // _ALIGNED + 1) * _ALIGNED
    host = np.zeros((8, width), dtype=np.int64)
    host[0, :count], host[1, :count] = sources, slots
    host[2, :count] = table.seed_key[slots].view(np.int64)
    host[3, :count] = table.length[slots] - table.num_prompt[slots]
    host[4, :count] = top_k
    host[5, 1 : count + 1] = np.cumsum(rooms)
    host[6].view(np.float32)[:count] = table.temperature[slots]
    host[6].view(np.float32)[width : width + count] = table.top_p[slots]
    host[7].view(np.float32)[:count] = table.min_p[slots]
    inputs = to_pinned(host, device).to(device, non_blocking=True)
    floats = inputs[6:].view(torch.float32)
    rows = TruncatedRows(
        sources=inputs[0, :count],
        seed_keys=inputs[2, :count],
        positions=inputs[3, :count],
        temperatures=floats[0, :count],
        top_k=inputs[4, :count],
        top_p=floats[0, width : width + count],
        min_p=floats[1, :count],
        list_starts=inputs[5, : count + 1],
    )
    return CutRows(rows, inputs[1, :count], host[5, : count + 1].copy())


@dataclass(frozen=True, slots=True)
class KeptSets:
    """The kept sets of some rows of a flight."""

    at: np.ndarray
    """int64 [Q], rows of the flight."""
    list_starts: np.ndarray
    counts: torch.Tensor
    listed: torch.Tensor
    """As in ``TruncatedDraws``, in pinned memory once the flight has landed."""
    kept_words: torch.Tensor
    """As there, on the device."""
    reading: torch.cuda.Stream | None
    """Where bits are read beside the passes."""

    def read(self) -> dict[int, np.ndarray]:
        """int32 kept ids by row of the flight, which has landed."""
        counts, listed, starts = self.counts.numpy(), self.listed.numpy(), self.list_starts[:-1]
        fits = counts <= np.diff(self.list_starts)
        # Copied, so that the whole list does not live as long as its smallest set.
        kept = {
            int(at): listed[start : start + count].copy()
            for at, start, count in zip(self.at[fits], starts[fits], counts[fits], strict=True)
        }
        outgrown = np.flatnonzero(~fits)
        if len(outgrown):
            kept.update(zip(self.at[outgrown].tolist(), self._from_bits(outgrown), strict=True))
        return kept

    def _from_bits(self, which: np.ndarray) -> list[np.ndarray]:
        device = self.kept_words.device
        with nullcontext() if self.reading is None else torch.cuda.stream(self.reading):
            words = self.kept_words[torch.from_numpy(which).to(device)].cpu().numpy()
        return [
            np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).astype(np.int32)
            for row in words
        ]


def kept_sets(
    draws: TruncatedDraws, cut: CutRows, at: np.ndarray, reading: torch.cuda.Stream | None
) -> KeptSets:
    """Send the lists on their way to the host."""
    return KeptSets(
        at, cut.list_starts, to_host(draws.counts), to_host(draws.listed), draws.kept_words, reading
    )


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, there once the work queued so far is done."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
