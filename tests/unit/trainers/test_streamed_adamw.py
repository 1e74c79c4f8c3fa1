"""Moments that pass through a device, over streams that are simulated: copies and updates are queued, and done in any
order that the waits between streams allow, different in every run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from headrace.trainers import streamed_adamw
from headrace.trainers.host_memory import HostMemory
from headrace.trainers.streamed_adamw import MOMENTS, StreamedAdamW

SHAPES = [(16, 7), (16,), (3, 16), (48,), (200, 2), (90, 16), (33,)]
PIECE = 48
"""Whole vectors of the processor, since what is left over after them is rounded otherwise."""
SLOT_BYTES = 2 * PIECE * 4


class Event:
    def __init__(self, device: Device, stream: Stream, index: int) -> None:
        self._device, self._stream, self._index = device, stream, index

    @property
    def is_done(self) -> bool:
        return self._stream.num_done >= self._index

    def synchronize(self) -> None:
        self._device.run(lambda: self.is_done)


class Stream:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.queue: list[Event | Callable[[], object]] = []
        self.num_done = 0
        self.speed = device.chance.choice((1.0, 0.01))
        device.streams.append(self)

    @property
    def is_ready(self) -> bool:
        if self.num_done == len(self.queue):
            return False
        first = self.queue[self.num_done]
        return not isinstance(first, Event) or first.is_done

    def advance(self) -> None:
        first = self.queue[self.num_done]
        if not isinstance(first, Event):
            first()
        self.num_done += 1

    def record_event(self) -> Event:
        return Event(self._device, self, len(self.queue))

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Device:
    """Its streams, of which any that need not wait goes on, some of them hardly ever."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.streams: list[Stream] = []
        self.main = Stream(self)
        self.copying: Stream | None = None
        self.asked: list[Stream] = []
        """Of each copy the stream it was queued on."""
        self.done: list[int] = []
        """Numbers of copies, in the order in which they were done."""
        self.slots: list[torch.Tensor] = []
        self.used: dict[int, Stream] = {}
        self.kept: dict[int, Stream] = {}
        """Memory that was taken; by its address, the stream that copies from or to it last, and the one before whose
        end it must not be taken again."""

    @property
    def arriving(self) -> Stream:
        return self.streams[1]

    @property
    def leaving(self) -> list[Stream]:
        return self.streams[2:]

    @property
    def num_copies(self) -> int:
        return len(self.asked)

    def queue_copy(self, stream: Stream, copy: Callable[[], object]) -> None:
        number = self.num_copies
        self.asked.append(stream)
        stream.queue.append(lambda: (copy(), self.done.append(number)))

    def check_kept(self, *by: Stream) -> None:
        """All memory that was taken since the last look."""
        assert self.slots
        for address in {slot.data_ptr() for slot in self.slots}:
            assert self.kept[address] is self.used[address] and self.kept[address] in by
        self.slots, self.used, self.kept = [], {}, {}

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            ready = [stream for stream in self.streams if stream.is_ready]
            assert ready, "every stream waits for another"
            (chosen,) = self.chance.choices(ready, [stream.speed for stream in ready])
            chosen.advance()

    def finish_main(self) -> None:
        """Of the others some may be done, and some not."""
        self.run(lambda: self.main.num_done == len(self.main.queue))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.copying = stream
        try:
            yield
        finally:
            self.copying = None


@pytest.fixture(params=range(8))
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    made, copy, empty = Device(request.param), torch.Tensor.copy_, torch.empty

    def queued(to: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        stream = made.copying
        if stream is None:
            return copy(to, source)
        for tensor in (to, source):
            made.used[tensor.untyped_storage().data_ptr()] = stream
        made.queue_copy(stream, lambda: copy(to, source))
        return to

    def taken(*shape: Any, **given: Any) -> torch.Tensor:
        """Memory to which whatever had it before still writes."""
        slot = empty(*shape, **given)
        made.slots.append(slot)
        made.main.queue.append(lambda: slot.fill_(torch.nan))
        return slot

    monkeypatch.setattr(torch, "empty", taken)
    monkeypatch.setattr(torch.Tensor, "copy_", queued)

    def keep(slot: torch.Tensor, stream: Stream) -> None:
        made.kept[slot.data_ptr()] = stream

    monkeypatch.setattr(torch.Tensor, "record_stream", keep)
    monkeypatch.setattr(torch.cuda, "Stream", lambda place: Stream(made))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: made.main)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(streamed_adamw, "_is_apart", lambda parameter: True)
    return made


class Queued(StreamedAdamW):
    """Updates when the main stream comes to it."""

    device: Device

    def _update(self, *given: Any) -> None:
        gradients = {span.parameter: span.parameter.grad for span in given[0]}

        def update() -> None:
            with torch.no_grad():
                for parameter, gradient in gradients.items():
                    parameter.grad = gradient
                super(Queued, self)._update(*given)

        self.device.main.queue.append(update)


def build(
    device: Device, on_host: tuple[str, ...], *, one_group: bool = False
) -> tuple[list[nn.Parameter], torch.optim.AdamW, Queued]:
    """Parameters of both, and of groups with and without decay."""
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    streamed = [nn.Parameter(parameter.detach().clone()) for parameter in plain]

    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        if one_group:
            return [{"params": parameters}]
        return [{"params": parameters[2:], "weight_decay": 0.1}, {"params": parameters[:2]}]

    # Not zeros, whatever comes of it.
    memory = HostMemory(lambda num_bytes: torch.full((num_bytes,), 255, dtype=torch.uint8))
    second = Queued(groups(streamed), piece_numel=PIECE, on_host=on_host, host_memory=memory, lr=0.01)
    second.device = device
    return [*plain, *streamed], torch.optim.AdamW(groups(plain), fused=True, lr=0.01), second


def give_gradients(parameters: list[nn.Parameter], *, leave_out: int | None = None) -> None:
    half = len(parameters) // 2
    for index, (one, other) in enumerate(zip(parameters[:half], parameters[half:], strict=True)):
        one.grad = None if index == leave_out else torch.randn(one.shape)
        other.grad = None if one.grad is None else one.grad.clone()


def check_alike(parameters: list[nn.Parameter], first: torch.optim.AdamW, second: Queued) -> None:
    half = len(parameters) // 2
    for one, other in zip(parameters[:half], parameters[half:], strict=True):
        assert torch.equal(one, other)
        assert list(first.state[one]) == list(second.state[other])
        assert all(torch.equal(value, second.state[other][key]) for key, value in first.state[one].items())


@pytest.mark.parametrize("on_host", [MOMENTS, MOMENTS[:1]], ids=["both", "first"])
@pytest.mark.parametrize("early", [(), (1,), (2, 5), (1, 1, 4, 9), (1000,)], ids=str)
def test_whatever_is_brought_early_the_bits_are_those_of_plain_adamw(
    device: Device, early: tuple[int, ...], on_host: tuple[str, ...]
) -> None:
    """``early``: numbers of pieces, of some fifty."""
    parameters, first, second = build(device, on_host)
    for step in range(4):
        give_gradients(parameters)
        for num_pieces in early:
            second.bring(num_pieces * SLOT_BYTES * len(on_host) // 2)
        first.step()
        second.step()
        device.finish_main()
        if step % 2:
            second.zero_grad()
    second.settle()
    check_alike(parameters, first, second)
    device.check_kept(*device.leaving)
    num_spans = sum(len(piece) for _, pieces in second._cut.values() for piece in pieces)
    assert device.num_copies == 4 * 2 * num_spans * len(on_host), "in and out, each moment once a step"


def test_what_was_brought_for_one_update_is_not_used_for_the_next(device: Device) -> None:
    parameters, first, second = build(device, MOMENTS, one_group=True)
    for num_early in (0, 4, 4, 0):
        give_gradients(parameters)
        second.bring(num_early * SLOT_BYTES)
        first.step()
        second.step()
        device.finish_main()
    second.settle()
    check_alike(parameters, first, second)


@pytest.mark.parametrize("on_host", [MOMENTS, MOMENTS[:1]], ids=["both", "first"])
def test_room_is_counted_from_the_first_call(device: Device, on_host: tuple[str, ...]) -> None:
    parameters, _, second = build(device, on_host)
    slot_bytes = SLOT_BYTES * len(on_host) // 2
    give_gradients(parameters)
    second.bring(4 * slot_bytes)
    assert not second._early, "there are no moments before the first step"
    second.step()
    second.zero_grad()
    for room, brought in ((0, 0), (slot_bytes - 1, 0), (slot_bytes, 1), (slot_bytes, 1), (4 * slot_bytes, 4)):
        second.bring(room)
        assert len(second._early) == brought


@pytest.mark.parametrize("num_early", [0, 2, 20, 1000])
def test_pieces_whose_room_nobody_needs_stay_until_they_are_sent_back(device: Device, num_early: int) -> None:
    """While they leave, whatever else the host reads waits for about one of them."""
    parameters, first, second = build(device, MOMENTS)
    for step in range(3):
        give_gradients(parameters)
        second.bring(num_early * SLOT_BYTES)
        first.step()
        second.step()
        device.finish_main()
        large, small = (len(pieces) for _, pieces in second._cut.values())
        brought = min(num_early, large) if step else 0
        assert len(second._staying) == max(brought, min(3, large)) + min(3, small)
        num_copies = device.num_copies
        num_due = sum(len(visit.guests) for visit in second._staying)
        second.send_back()
        assert not second._staying and device.num_copies == num_copies + num_due
        device.check_kept(*device.leaving)
    second.settle()
    check_alike(parameters, first, second)


@pytest.mark.parametrize("num_early", [0, 20])
def test_pieces_leave_on_two_streams_in_turn_and_one_after_another(device: Device, num_early: int) -> None:
    """So that what else the host reads can come between two of them."""
    parameters, _, second = build(device, MOMENTS, one_group=True)
    for _ in range(3):
        give_gradients(parameters)
        second.bring(num_early * SLOT_BYTES)
        second.step()
        device.finish_main()
    second.settle()
    leaving = [number for number, stream in enumerate(device.asked) if stream in device.leaving]
    turns = [len(list(copies)) for _, copies in groupby(device.asked[number] for number in leaving)]
    ((_, pieces),) = second._cut.values()
    assert turns == 3 * [len(MOMENTS) * len(piece) for piece in pieces]
    assert [number for number in device.done if device.asked[number] in device.leaving] == leaving


def test_what_stays_is_sent_back_before_anything_comes_again(device: Device) -> None:
    parameters, first, second = build(device, MOMENTS)
    for step in range(4):
        give_gradients(parameters)
        if step % 2:
            second.bring(5 * SLOT_BYTES)
            assert not second._staying
        first.step()
        second.step()
        assert second._staying
        if step == 2:
            # Behind an update that is still to be done.
            second.send_back()
        device.finish_main()
    second.settle()
    assert not second._staying
    check_alike(parameters, first, second)


def test_nothing_is_brought_where_moments_are_missing(device: Device) -> None:
    """As after a checkpoint that holds none of a parameter."""
    parameters, _, second = build(device, MOMENTS)
    give_gradients(parameters)
    second.step()
    device.finish_main()
    second.settle()
    del second.state[parameters[-1]]
    second.bring(9 * SLOT_BYTES)
    assert not second._early and parameters[-1] not in second.state


def test_what_was_brought_for_other_parameters_is_not_used(device: Device) -> None:
    """One that had a gradient has none now, and the pieces are cut elsewhere."""
    parameters, first, second = build(device, MOMENTS)
    for leave_out in (None, 3, None):
        if leave_out is None:
            give_gradients(parameters)
            second.bring(5 * SLOT_BYTES)
        else:
            second.bring(5 * SLOT_BYTES)
            give_gradients(parameters, leave_out=leave_out)
        first.step()
        second.step()
        device.finish_main()
    second.settle()
    check_alike(parameters, first, second)


def test_an_update_that_is_not_to_be_leaves_nothing_behind(device: Device) -> None:
    parameters, first, second = build(device, MOMENTS)
    for skipped in (False, True, False):
        give_gradients(parameters)
        second.bring(7 * SLOT_BYTES)
        if not skipped:
            first.step()
            second.step()
            device.finish_main()
            second.send_back()
        second.zero_grad()
        assert not second._early
        device.check_kept(*[device.arriving] if skipped else device.leaving)
        second.settle()
        assert all(stream.num_done == len(stream.queue) for stream in device.streams[1:])
    check_alike(parameters, first, second)


@pytest.mark.parametrize("is_found", [False, True], ids=["none is found", "some is found after a wait"])
def test_memory_that_lies_in_too_small_parts_is_no_fault(
    device: Device, monkeypatch: pytest.MonkeyPatch, is_found: bool
) -> None:
    """What there is of it is used, and it is not asked for again for a while: neither where the allocator finds no
    more, nor where it gave parts that the next layers would miss back to the GPU to find one that is large enough."""
    parameters, first, second = build(device, MOMENTS)
    empty, asked = torch.empty, []
    num_asked, num_given = (4, 4) if is_found else (3, 2)

    def taken(*given: Any, **more: Any) -> torch.Tensor:
        asked.append(given)
        return empty(*given, **more) if len(asked) <= num_given else _no_room()

    for number in range(1 + streamed_adamw._REST_UPDATES):
        give_gradients(parameters)
        asked.clear()
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", taken)
            patched.setattr(streamed_adamw, "_num_retries", lambda _: is_found and len(asked) // num_given)
            second.bring(7 * SLOT_BYTES)
            second.bring(9 * SLOT_BYTES)
        # There are no moments at first.
        assert (len(asked), len(second._early)) == ((num_asked, num_given) if number == 1 else (0, 0))
        first.step()
        second.step()
        device.finish_main()
        second.zero_grad()
    second.bring(7 * SLOT_BYTES)
    assert len(second._early) == 7
    second.zero_grad()
    second.settle()
    check_alike(parameters, first, second)


def test_an_update_without_memory_keeps_what_moments_still_come_to(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters, _, second = build(device, MOMENTS)
    give_gradients(parameters)
    second.step()
    device.finish_main()
    second.send_back()
    device.check_kept(*device.leaving)
    second.bring(SLOT_BYTES)
    monkeypatch.setattr(torch, "empty", _no_room)
    with pytest.raises(torch.OutOfMemoryError):
        second.step()
    second.zero_grad()
    device.check_kept(device.arriving)


def test_what_leaves_in_a_half_done_update_is_waited_for(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters, _, second = build(device, MOMENTS)
    give_gradients(parameters)
    arrive, arrived = second._arrive, []

    def fail_in_the_end(piece: Any, *given: Any) -> Any:
        arrived.append(piece)
        return _no_room() if len(arrived) == 3 else arrive(piece, *given)

    monkeypatch.setattr(second, "_arrive", fail_in_the_end)
    with pytest.raises(torch.OutOfMemoryError):
        second.step()
    second.settle()
    assert all(leaving.num_done == len(leaving.queue) > 0 for leaving in device.leaving)


def _no_room(*_: object, **__: object) -> NoReturn:
    raise torch.OutOfMemoryError
