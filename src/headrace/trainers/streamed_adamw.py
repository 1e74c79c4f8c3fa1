"""AdamW whose moments, or the first ones of them, lie in host memory.

In: parameters with gradients. Out: what ``torch.optim.AdamW(fused=True)`` makes of them, bit for bit. On a GPU the
moments in host memory pass through it in pieces, on streams of their own for either direction, and a step waits for as
little of that as can be. While the last gradients are computed, ``bring`` begins with as many pieces as the memory that
becomes free has room for; while one piece is updated, the next is on its way in; the last pieces stay until
``send_back``, since while they leave whatever else the host reads waits for about one of them; and for all that is on
its way out nobody waits before ``settle``, which is for who reads moments or needs the memory that they leave.
Elsewhere host memory is where the parameters are, and nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from headrace.trainers.host_memory import HostMemory
from headrace.trainers.moment_pieces import Piece, cut, numel
from headrace.trainers.moment_traffic import Moments, MomentTraffic, Visit

MOMENTS = ("exp_avg", "exp_avg_sq")
PIECE_NUMEL = 2**24
"""Parameters of a piece, whose moments are 128 MB: much for a copy, and little where the first has to be waited for."""
_NUM_SLOTS = 3
"""Pieces of a group on the device at once: one on its way in, one that is updated, one on its way out. More, where more
were brought before."""
_REST_UPDATES = 16
"""So many, from the coming one on, bring nothing more before it is due, once there was no memory for it: a GPU that is
asked for memory it does not have waits for all that it was given."""


class StreamedAdamW(torch.optim.AdamW):
    """Its state has the keys and shapes of AdamW's own."""

    def __init__(
        self,
        *args: Any,
        on_host: Sequence[str] = MOMENTS,
        host_memory: HostMemory | None = None,
        piece_numel: int = PIECE_NUMEL,
        **kwargs: Any,
    ) -> None:
        """``on_host``: those of ``MOMENTS`` that lie in host memory; the others are where the parameters are.
        ``host_memory``: where a GPU's are put; None: in some of its own."""
        super().__init__(*args, fused=True, **kwargs)
        self._host_memory = host_memory or HostMemory()
        self._on_host = tuple(name in on_host for name in MOMENTS)
        self._piece_numel = piece_numel
        self._known_traffic: MomentTraffic | None = None
        self._cut: dict[int, tuple[list[torch.Tensor], list[Piece]]] = {}
        """By group, the parameters that were updated last, and their pieces."""
        self._early: list[Visit] = []
        self._early_of: list[Piece] = []
        """Pieces of the first group, of the first of which there are visits."""
        self._staying: list[Visit] = []
        """Updated, and not on their way back yet."""
        self._num_resting = 0
        """Coming updates for which ``bring`` asks for no memory."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. On a GPU they are updated when its stream has come to the end of
        what is launched here; the moments leave after that, the last ones when they are sent back."""
        self.send_back()
        try:
            for number, group in enumerate(self.param_groups):
                self._step(number, group)
        finally:
            self._num_resting = max(0, self._num_resting - 1)

    @torch.no_grad()
    def bring(self, num_bytes: int) -> None:
        """Begin with the moments of the coming update, as far as so much memory, counted from the first call, has room
        for them. It is taken to be of the parameters that were updated last."""
        parameters, pieces = self._cut.get(0, ([], []))
        if not pieces or not _is_apart(parameters[0]) or not all(self.state.get(p) for p in parameters):
            return
        num_more = min(num_bytes // self._slot_bytes(pieces), len(pieces)) - len(self._early)
        if num_more <= 0 or self._num_resting:
            return
        self.send_back()
        slots = self._slots_there_is_room_for(pieces, num_more)
        self._traffic.make_way()
        self._early_of = pieces
        for slot in slots:
            self._early.append(self._arrive(pieces[len(self._early)], slot, None))

    @torch.no_grad()
    def send_back(self) -> None:
        """Have the moments leave that are still where they were updated. While they do, whatever else the host reads
        from the GPU waits for about one piece."""
        staying, self._staying = self._staying, []
        for visit in staying:
            self._traffic.leave(visit)

    def settle(self) -> None:
        """Returns when the moments of the last update are back in host memory, and what came for none has come."""
        self.send_back()
        if self._known_traffic is not None:
            self._known_traffic.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also sends away what was brought for an update that is not to be."""
        super().zero_grad(set_to_none)
        self._drop_early()

    def _step(self, number: int, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        self._count(parameters)
        pieces = self._pieces(number, parameters)
        if pieces and _is_apart(parameters[0]):
            self._stream(pieces, group)
        else:
            for piece in pieces:
                self._update(piece, self._moments(piece, None), group)

    def _count(self, parameters: Sequence[torch.Tensor]) -> None:
        """One more step of each parameter, whose moments are made at its first."""
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for name, on_host in zip(MOMENTS, self._on_host, strict=True):
                    if on_host and _is_apart(parameter):
                        state[name] = self._host_memory.take(parameter.shape, parameter.dtype).zero_()
                    else:
                        device = "cpu" if on_host else parameter.device
                        state[name] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        if parameters:
            torch._foreach_add_([self.state[parameter]["step"] for parameter in parameters], 1)

    def _pieces(self, number: int, parameters: list[torch.Tensor]) -> list[Piece]:
        """The very same list as in the step before, where the parameters are the same."""
        before, pieces = self._cut.get(number, ([], []))
        if list(map(id, before)) != list(map(id, parameters)):
            pieces = list(cut(parameters, self._piece_numel))
            self._cut[number] = parameters, pieces
        return pieces

    def _stream(self, pieces: list[Piece], group: dict[str, Any]) -> None:
        if pieces is not self._early_of:
            self._drop_early()
        traffic, early, device = self._traffic, self._early, pieces[0][0].parameter.device
        num_new = max(min(_NUM_SLOTS, len(pieces)) - len(early), 0)
        slots = [self._new_slot(pieces) for _ in range(num_new)]
        traffic.make_way()
        free: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque((slot, None) for slot in slots)
        num_leaving = len(pieces) - len(early) - num_new
        for index, piece in enumerate(pieces):
            visit = early[index] if index < len(early) else self._arrive(piece, *free.popleft())
            torch.cuda.current_stream(device).wait_event(visit.arrived)
            self._update(piece, visit.moments, group)
            if index < num_leaving:
                free.append((visit.slot, traffic.leave(visit)))
            else:
                # Nobody needs its slot.
                self._staying.append(visit)
        self._early = []

    def _drop_early(self) -> None:
        early, self._early = self._early, []
        if early:
            self._traffic.abandon(early)

    def _arrive(self, piece: Piece, slot: torch.Tensor, free: torch.cuda.Event | None) -> Visit:
        at_home, there = self._moments(piece, None), self._moments(piece, slot)
        guests = [
            (host[i], guest[i])
            for host, guest in zip(at_home, there, strict=True)
            for i, on_host in enumerate(self._on_host)
            if on_host
        ]
        return self._traffic.arrive(slot, there, guests, free=free)

    def _slots_there_is_room_for(self, pieces: list[Piece], most: int) -> list[torch.Tensor]:
        """Fewer, or none, where memory is free but lies in too small parts: then the update brings the rest, and a
        while passes before more is asked for. The allocator may still find some, for which it has waited for the GPU
        and given back what the next layers need."""
        device, slots = pieces[0][0].parameter.device, list[torch.Tensor]()
        num_retries = _num_retries(device)
        try:
            while len(slots) < most and not self._num_resting:
                slots.append(self._new_slot(pieces))
                if _num_retries(device) > num_retries:
                    self._num_resting = _REST_UPDATES
        except torch.OutOfMemoryError:
            self._num_resting = _REST_UPDATES
        return slots

    def _new_slot(self, pieces: list[Piece]) -> torch.Tensor:
        shape = sum(self._on_host), numel(pieces[0])
        return torch.empty(shape, device=pieces[0][0].parameter.device)

    def _slot_bytes(self, pieces: list[Piece]) -> int:
        return sum(self._on_host) * numel(pieces[0]) * pieces[0][0].parameter.element_size()

    def _moments(self, piece: Piece, slot: torch.Tensor | None) -> list[Moments]:
        """Of a piece's spans, those in host memory in the slot, one behind the other; None: all where they lie."""
        sizes = [span.numel for span in piece]
        rows = iter(() if slot is None else slot)
        first, second = (
            next(rows)[: sum(sizes)].split(sizes)
            if on_host and slot is not None
            else [span.of(self.state[span.parameter][name]) for span in piece]
            for name, on_host in zip(MOMENTS, self._on_host, strict=True)
        )
        return list(zip(first, second, strict=True))

    @property
    def _traffic(self) -> MomentTraffic:
        """Asked for only where parameters are on a GPU, all of them on one."""
        if self._known_traffic is None:
            self._known_traffic = MomentTraffic(self.param_groups[0]["params"][0].device)
        return self._known_traffic

    def _update(self, piece: Piece, moments: list[Moments], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            [span.of(span.parameter) for span in piece],
            [span.of(span.parameter.grad) for span in piece],
            [first for first, _ in moments],
            [second for _, second in moments],
            [],
            [self.state[span.parameter]["step"] for span in piece],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def _num_retries(device: torch.device) -> int:
    """How often the allocator has given memory back to find some that lies together, waiting for the GPU."""
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))


def _is_apart(parameter: torch.Tensor) -> bool:
    """Whether host memory is another one than the parameter's."""
    return parameter.is_cuda
