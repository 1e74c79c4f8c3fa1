"""AdamW whose moments, or the first ones of them, lie in host memory.

In: parameters with gradients. Out: what ``torch.optim.AdamW(fused=True)`` makes of them, bit for bit. On a GPU the
moments in host memory pass through it in pieces: while one piece is updated, the next is on its way in and the last
on its way out, each on a stream of its own, so that a step waits for the copies in one direction and for little else.
The pieces lie where activations have been, since a step has none of them any more. Elsewhere host memory is where the
parameters are, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
PIECE_NUMEL = 2**24
"""Parameters of a piece, whose moments are 128 MB: much for a copy, and little where the first piece on its way in and
the last on its way out have to be waited for."""
_NUM_SLOTS = 3
"""Pieces on the device at once: one on its way in, one that is updated, one on its way out."""


_Moments = tuple[torch.Tensor, torch.Tensor]
"""The first and the second."""


@dataclass(frozen=True, slots=True)
class _Span:
    """A run of one parameter's numbers, as flat views."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    moments: _Moments
    """Wherever they lie."""
    step: torch.Tensor

    @property
    def numel(self) -> int:
        return self.parameter.numel()


class StreamedAdamW(torch.optim.AdamW):
    """Its state has the keys and shapes of AdamW's own."""

    def __init__(
        self,
        *args: Any,
        on_host: Sequence[str] = MOMENTS,
        piece_numel: int = PIECE_NUMEL,
        **kwargs: Any,
    ) -> None:
        """``on_host``: those of ``MOMENTS`` that lie in host memory; the others are where the parameters are."""
        super().__init__(*args, fused=True, **kwargs)
        self._on_host = tuple(name in on_host for name in MOMENTS)
        self._piece_numel = piece_numel
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. On a GPU the moments have left it when its stream has come
        to the end of what is launched here."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._count(parameters)
            pieces = list(self._pieces(parameters))
            if pieces and parameters[0].is_cuda:
                self._stream(pieces, group)
            else:
                for piece in pieces:
                    _update(piece, [span.moments for span in piece], group)

    def _count(self, parameters: list[torch.Tensor]) -> None:
        """One more step of each parameter, whose moments are made at its first."""
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for name, on_host in zip(MOMENTS, self._on_host, strict=True):
                    # A GPU reads and writes pinned memory by itself.
                    state[name] = torch.zeros(
                        parameter.shape,
                        dtype=parameter.dtype,
                        device="cpu" if on_host else parameter.device,
                        pin_memory=on_host and parameter.is_cuda,
                    )
        if parameters:
            torch._foreach_add_([self.state[parameter]["step"] for parameter in parameters], 1)

    def _pieces(self, parameters: list[torch.Tensor]) -> Iterator[list[_Span]]:
        """Parameters in order, cut so that every piece but the last is full."""
        piece: list[_Span] = []
        room = self._piece_numel
        for parameter in parameters:
            assert parameter.grad is not None
            state, start = self.state[parameter], 0
            flat = [parameter, parameter.grad, *(state[name] for name in MOMENTS)]
            flat = [tensor.view(-1) for tensor in flat]
            while start < parameter.numel():
                stop = min(start + room, parameter.numel())
                weight, gradient, first, second = (tensor[start:stop] for tensor in flat)
                piece.append(_Span(weight, gradient, (first, second), state["step"]))
                room -= stop - start
                start = stop
                if not room:
                    yield piece
                    piece, room = [], self._piece_numel
        if piece:
            yield piece

    def _stream(self, pieces: list[list[_Span]], group: dict[str, Any]) -> None:
        device = pieces[0][0].parameter.device
        if self._streams is None:
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        arriving, leaving = self._streams
        main = torch.cuda.current_stream(device)
        longest = max(sum(span.numel for span in piece) for piece in pieces)
        # Taken on the main stream, whose freed memory is there; a side stream would be given memory of its own.
        num_slots, num_moments = min(_NUM_SLOTS, len(pieces)), sum(self._on_host)
        slots = [torch.empty(num_moments, longest, device=device) for _ in range(num_slots)]
        arriving.wait_stream(main)
        left: list[torch.cuda.Event] = []
        for index, piece in enumerate(pieces):
            if index >= len(slots):
                arriving.wait_event(left[index - len(slots)])
            there = self._laid_out(slots[index % len(slots)], piece)
            visits = [
                (host, guest)
                for span, moments in zip(piece, there, strict=True)
                for host, guest in zip(span.moments, moments, strict=True)
                if guest is not host
            ]
            with torch.cuda.stream(arriving):
                for host, guest in visits:
                    guest.copy_(host, non_blocking=True)
            main.wait_stream(arriving)
            _update(piece, there, group)
            leaving.wait_stream(main)
            with torch.cuda.stream(leaving):
                for host, guest in visits:
                    host.copy_(guest, non_blocking=True)
            left.append(leaving.record_event())
        # The slots' memory is used again by whatever the main stream does next.
        main.wait_stream(leaving)

    def _laid_out(self, slot: torch.Tensor, piece: list[_Span]) -> list[_Moments]:
        """A piece's moments on the device: in the slot, one span after the other, or where they lie anyway."""
        sizes = [span.numel for span in piece]
        rows = iter(slot)
        first, second = (
            next(rows)[: sum(sizes)].split(sizes) if on_host else tuple(span.moments[i] for span in piece)
            for i, on_host in enumerate(self._on_host)
        )
        return list(zip(first, second, strict=True))


def _update(piece: list[_Span], moments: list[_Moments], group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        [span.parameter for span in piece],
        [span.gradient for span in piece],
        [first for first, _ in moments],
        [second for _, second in moments],
        [],
        [span.step for span in piece],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
