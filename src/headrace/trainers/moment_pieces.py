"""A model's parameters, cut into pieces of which one at a time has its moments on the device.

In: parameters in order. Out: pieces, each a list of spans; a large parameter is cut across several, small ones lie in
one together. Every number belongs to exactly one span, and every piece but the last is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """A run of one parameter's numbers."""

    parameter: torch.Tensor
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Its part of a tensor with the parameter's shape, as a flat view."""
        assert tensor is not None
        return tensor.view(-1)[self.start : self.stop]


Piece = list[Span]


def cut(parameters: Sequence[torch.Tensor], piece_numel: int) -> Iterator[Piece]:
    piece: Piece = []
    room = piece_numel
    for parameter in parameters:
        start = 0
        while start < parameter.numel():
            span = Span(parameter, start, min(start + room, parameter.numel()))
            piece.append(span)
            room, start = room - span.numel, span.stop
            if not room:
                yield piece
                piece, room = [], piece_numel
    if piece:
        yield piece


def numel(piece: Piece) -> int:
    return sum(span.numel for span in piece)
