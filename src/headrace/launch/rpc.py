"""Calls between processes: many at once over one channel, each with a deadline.

    caller -> server   ["call", id, method, wants_notes, *args]    ["cancel", id]
    server -> caller   ["note", id, value]  ["result", id, value]  ["error", id, class, message, traceback]
    server -> caller   ["event", name, value]                      belongs to no call

Invariant: a call ends exactly once: with its result; with the error raised over there, as the same
class if it is one of ``headrace.errors`` and as RoleError if not, and the remote traceback as its
cause; with DeadlineError; or with RoleError when the channel ends. Notes of a call arrive before its result.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from headrace import errors
from headrace.errors import DeadlineError, HeadraceError, RoleError
from headrace.launch.channel import Channel, ChannelClosed

Note = Callable[[Any], None]
Dispatch = Callable[[str, list[Any], Note | None], Awaitable[Any]]

_ERRORS = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, HeadraceError)
}
_NOTES_BACKLOG_BYTES = 1 << 20


class RemoteTraceback(Exception):
    """The traceback of an error in another process, as text."""


@dataclass(slots=True)
class _Pending:
    method: str
    answer: asyncio.Future[Any]
    on_note: Note | None
    deadline_s: float
    due: float
    """When the deadline passes, on the event loop's clock."""


class Caller:
    """The controller's end of a channel to one role."""

    def __init__(
        self,
        role: str,
        channel: Channel,
        *,
        on_event: Callable[[str, Any], None],
        explain_end: Callable[[], Awaitable[str]],
    ) -> None:
        """``explain_end`` is asked once, when the channel ends, why it did; the answer becomes the message of
        every RoleError from then on."""
        self.role = role
        self._channel = channel
        self._on_event = on_event
        self._explain_end = explain_end
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._alarm: asyncio.TimerHandle | None = None
        """Rings no later than the first deadline: one timer for all calls, since hardly any deadline passes."""
        self._end: str | None = None
        self._pump = asyncio.create_task(self._receive(), name=f"{role} answers")

    async def call(self, method: str, *args: Any, deadline_s: float, on_note: Note | None = None) -> Any:
        if self._end is not None:
            raise RoleError(self._end)
        call_id = next(self._ids)
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._channel.post(["call", call_id, method, on_note is not None, *args])
        due = self._loop.time() + deadline_s
        self._pending[call_id] = _Pending(method, answer, on_note, deadline_s, due)
        self._ring_by(due)
        try:
            return await answer
        finally:
            del self._pending[call_id]
            if answer.cancelled():
                self._channel.post(["cancel", call_id])

    async def close(self) -> None:
        self._channel.abandon()
        await self.wait_end()

    async def wait_end(self) -> None:
        """Returns when the channel has ended and every pending call has failed."""
        await asyncio.shield(self._pump)

    def _ring_by(self, due: float) -> None:
        if self._alarm is not None:
            if self._alarm.when() <= due:
                return
            self._alarm.cancel()
        self._alarm = self._loop.call_at(due, self._give_up)

    def _give_up(self) -> None:
        """Fail the calls whose deadline has passed, and have the next one ring."""
        now, self._alarm = self._loop.time(), None
        waiting = {i: p for i, p in self._pending.items() if not p.answer.done()}
        for call_id, pending in waiting.items():
            if pending.due > now:
                self._ring_by(pending.due)
                continue
            pending.answer.set_exception(
                DeadlineError(
                    f"{self.role} did not answer {pending.method!r} within {pending.deadline_s:g} s; "
                    "its log may say why"
                )
            )
            self._channel.post(["cancel", call_id])

    async def _receive(self) -> None:
        try:
            while True:
                self._handle(await self._channel.receive())
        except ChannelClosed:
            reason = await self._explain_end()
        except Exception as error:
            self._channel.abandon()
            reason = f"{self.role} sent what cannot be read: {type(error).__name__}: {error}"
        self._end = reason
        if self._alarm is not None:
            self._alarm.cancel()
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(RoleError(f"{reason} ({pending.method!r} was under way)"))

    def _handle(self, message: Any) -> None:
        match message:
            case ["event", name, value]:
                self._on_event(name, value)
            case [kind, call_id, *rest]:
                pending = self._pending.get(call_id)
                # A call that was given up may still be answered.
                if pending is not None and not pending.answer.done():
                    self._settle(pending, kind, rest)

    def _settle(self, pending: _Pending, kind: str, rest: list[Any]) -> None:
        if kind == "result":
            pending.answer.set_result(rest[0])
        elif kind == "error":
            pending.answer.set_exception(self._rebuild(pending.method, *rest))
        elif kind == "note" and pending.on_note is not None:
            try:
                pending.on_note(rest[0])
            except Exception as error:
                pending.answer.set_exception(error)

    def _rebuild(self, method: str, class_name: str, message: str, remote: str) -> Exception:
        known = _ERRORS.get(class_name)
        error = known(message) if known else RoleError(f"{self.role}.{method} raised {class_name}: {message}")
        error.__cause__ = RemoteTraceback(f"\n\n{self.role}:\n{remote}")
        return error


class Server:
    """A role's end: answers calls until the channel ends."""

    def __init__(self, channel: Channel, dispatch: Dispatch) -> None:
        self._channel = channel
        self._dispatch = dispatch
        self._running: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Returns when the caller is gone; what was still running is cancelled."""
        try:
            while True:
                self._handle(await self._channel.receive())
        except ChannelClosed:
            return
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _handle(self, message: Any) -> None:
        match message:
            case ["call", call_id, method, wants_notes, *args]:
                task = asyncio.create_task(self._answer(call_id, method, args, wants_notes), name=method)
                self._running[call_id] = task
                task.add_done_callback(lambda _: self._running.pop(call_id, None))
            case ["cancel", call_id]:
                if call_id in self._running:
                    self._running[call_id].cancel()

    async def _answer(self, call_id: int, method: str, args: list[Any], wants_notes: bool) -> None:
        try:
            result = await self._dispatch(method, args, self._note(call_id) if wants_notes else None)
            self._channel.post(["result", call_id, result])
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._channel.post(["error", call_id, *_describe(error)])
        except Exception as error:
            self._channel.post(["error", call_id, *_describe(error)])

    def _note(self, call_id: int) -> Note:
        def note(value: Any) -> None:
            # Every note repeats what the ones before it said, so a slow reader is spared all but the next.
            if self._channel.backlog_bytes < _NOTES_BACKLOG_BYTES:
                self._channel.post(["note", call_id, value])

        return note


def _describe(error: BaseException) -> tuple[str, str, str]:
    """Name of the nearest class both ends know (else its own), message and traceback."""
    known = (c.__name__ for c in type(error).__mro__ if _ERRORS.get(c.__name__) is c)
    name = next(known, type(error).__name__)
    return name, str(error), "".join(traceback.format_exception(error))
