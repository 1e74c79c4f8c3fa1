"""One call of one reward function: which arguments it gets, where it runs, what its answer may be.

In: a function in TRL's signature and the arguments for one group. Out: one float or None per
completion, or ``CallFailed`` with the reason in words. Invariant: the event loop never waits on user
code longer than the deadline; a call that overruns it is abandoned and holds nothing back.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, SupportsFloat

from headrace.data.faults import in_words
from headrace.errors import RewardError

Deliver = Callable[[Any, BaseException | None], None]


class CallFailed(Exception):
    """A call that gave no usable answer; trying again may help."""


def declared_arguments(
    function: Callable[..., Any], name: str
) -> tuple[frozenset[str], frozenset[str] | None]:
    """(required, accepted) parameter names; accepted is None when the function takes ``**kwargs``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {name!r} has no signature to read ({error}): wrap it in a def") from error
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if positional:
        raise RewardError(
            f"reward {name!r} takes {positional[0]!r} by position only, but rewards are called by keyword: "
            "remove the / from its signature"
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = frozenset(p.name for p in named if p.default is p.empty)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return required, None if takes_any else frozenset(p.name for p in named)


def is_async(function: Callable[..., Any]) -> bool:
    """True for coroutine functions and for objects whose call is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def call(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, timeout_s: float, threads: Threads | None
) -> Any:
    """The function's answer; raises CallFailed when it raises or overruns ``timeout_s``. ``threads`` None: it
    is a coroutine function."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            if threads is None:
                return await function(**arguments)
            answer = await threads.run(lambda: function(**arguments))
            return await answer if isinstance(answer, Awaitable) else answer
    except CallFailed:
        raise
    except Exception as error:
        if deadline.expired():
            raise CallFailed(f"gave no answer within {timeout_s:g} s") from error
        raise CallFailed(f"raised {in_words(error)}") from error


def to_role_log(text: str) -> None:
    """Only in a process of its own, whose standard error is its log."""
    print(text, file=sys.stderr, flush=True)


def checked_values(answer: Any, num_completions: int) -> list[float | None]:
    """``answer`` as one float or None per completion; raises CallFailed saying what is wrong with it."""
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        raise CallFailed(
            f"returned a {type(answer).__name__} instead of a list with one number per completion"
        )
    values = list(answer)
    if len(values) != num_completions:
        raise CallFailed(f"returned {len(values)} values for {num_completions} completions")
    return [_checked_value(value, i) for i, value in enumerate(values)]


def _checked_value(value: Any, index: int) -> float | None:
    if value is None:
        return None
    # Numbers first: to ask whether something is like a float takes longer than most rewards.
    if not isinstance(value, (float, int)) and not isinstance(value, SupportsFloat):
        raise CallFailed(
            f"returned a {type(value).__name__} for completion {index} instead of a number or None"
        )
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise CallFailed(
            f"returned something for completion {index} that is not one number ({error})"
        ) from error
    if not math.isfinite(number):
        raise CallFailed(f"returned {number} for completion {index}")
    return number


class Threads:
    """Daemon threads for blocking calls, used again when their call has returned.

    A call that never returns keeps its thread and costs the others nothing: the next call finds another
    idle thread or starts one. The caller bounds how many run at a time.
    """

    def __init__(self) -> None:
        self._idle: list[_Thread] = []

    async def run(self, work: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        thread = self._idle.pop() if self._idle else _Thread()
        thread.start_call(work, lambda answer, error: self._deliver(loop, thread, done, answer, error))
        answer, error = await done
        if error is not None:
            raise CallFailed(f"raised {in_words(error)}") from error
        return answer

    def close(self) -> None:
        """End the idle threads; those in a call are daemons."""
        for thread in self._idle:
            thread.stop()
        self._idle.clear()

    def _deliver(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: _Thread,
        done: asyncio.Future[tuple[Any, BaseException | None]],
        answer: Any,
        error: BaseException | None,
    ) -> None:
        def on_loop() -> None:
            self._idle.append(thread)
            if not done.done():
                done.set_result((answer, error))

        try:
            loop.call_soon_threadsafe(on_loop)
        except RuntimeError:
            if not loop.is_closed():
                raise


class _Thread:
    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Deliver] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="reward", daemon=True).start()

    def start_call(self, work: Callable[[], Any], deliver: Deliver) -> None:
        self._calls.put((work, deliver))

    def stop(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            work, deliver = call
            answer, error = None, None
            try:
                answer = work()
            except BaseException as raised:
                # Also SystemExit: a reward function that calls exit() must not end the run unnoticed.
                error = raised
            deliver(answer, error)
