"""Moments on their way between host memory and a GPU, on streams of their own for either direction.

In: the moments of pieces, and slots of the GPU's memory for them. Out: visits, whose moments are there once ``arrived``
has come, and go back when they are told to, one piece after another. Nobody waits but streams: for what computes with a
piece before it leaves, and for the piece that left before it; for memory before something comes into it; and for a
piece to be back before it comes again. ``settle`` is for a host that reads moments, or needs the memory that they
leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

Moments = tuple[torch.Tensor, torch.Tensor]
"""The first and the second of a span."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A piece whose moments are on the device, or on their way there."""

    slot: torch.Tensor
    moments: list[Moments]
    """In the slot, or where they lie anyway."""
    guests: list[tuple[torch.Tensor, torch.Tensor]]
    """In host memory, and in the slot."""
    arrived: torch.cuda.Event


class MomentTraffic:
    """With one device. Slots are taken on the stream that computes, whose freed memory is there: a side stream would be
    given memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arriving = torch.cuda.Stream(device)
        # Two that take turns: whatever else is read from the GPU would wait for all that one stream was told to copy,
        # and comes between two behind the piece that is on its way (docs/decisions/0015).
        self._leaving = cycle((torch.cuda.Stream(device), torch.cuda.Stream(device)))
        self._left: torch.cuda.Event | None = None
        """When what was told to leave last, and all before it, will have left; None: nothing was."""
        self._in_vain: torch.cuda.Event | None = None
        """When what came last for an update that did not take place has arrived; None: nothing did."""

    @property
    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def make_way(self) -> None:
        """What arrives after this may come to slots that were taken before it, and from wherever pieces leave for:
        whoever had that memory is done then, and the pieces have left."""
        self._arriving.wait_stream(self._main)
        if self._left is not None:
            self._arriving.wait_event(self._left)

    def arrive(
        self,
        slot: torch.Tensor,
        moments: list[Moments],
        guests: list[tuple[torch.Tensor, torch.Tensor]],
        *,
        free: torch.cuda.Event | None,
    ) -> Visit:
        """``free``: when the last piece has left the slot; None: there was none."""
        if free is not None:
            self._arriving.wait_event(free)
        with torch.cuda.stream(self._arriving):
            for own, guest in guests:
                guest.copy_(own, non_blocking=True)
        return Visit(slot, moments, guests, self._arriving.record_event())

    def leave(self, visit: Visit) -> torch.cuda.Event:
        """Behind all that computes with it and all that leaves already; returns when it will have left."""
        leaving = next(self._leaving)
        leaving.wait_stream(self._main)
        if self._left is not None:
            leaving.wait_event(self._left)
        with torch.cuda.stream(leaving):
            for own, guest in visit.guests:
                own.copy_(guest, non_blocking=True)
        # Until then its memory is not used again.
        visit.slot.record_stream(leaving)
        self._left = leaving.record_event()
        return self._left

    def abandon(self, visits: Sequence[Visit]) -> None:
        """What came was in vain."""
        for visit in visits:
            # Until it has arrived its memory is not used again.
            visit.slot.record_stream(self._arriving)
        self._in_vain = self._arriving.record_event()

    def settle(self) -> None:
        """Returns when nothing that was told to leave, and nothing that came in vain, is on its way."""
        for copied in (self._left, self._in_vain):
            if copied is not None:
                copied.synchronize()
