"""One call of one reward function: which arguments it gets, where it runs, what its answer may be.

In: a function in TRL's signature and the arguments for one group. Out: one float or None per
completion, or ``CallFailed`` with the reason in words. Invariant: the event loop never waits on user
code longer than the deadline; a call that overruns it is abandoned and holds nothing back.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, SupportsFloat

from headrace.errors import RewardError


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
    function: Callable[..., Any], arguments: Mapping[str, Any], *, timeout_s: float, thread_name: str
) -> Any:
    """The function's answer; raises CallFailed when it raises or overruns ``timeout_s``."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            if is_async(function):
                return await function(**arguments)
            answer = await _in_thread(lambda: function(**arguments), thread_name)
            return await answer if isinstance(answer, Awaitable) else answer
    except CallFailed:
        raise
    except Exception as error:
        if deadline.expired():
            raise CallFailed(f"gave no answer within {timeout_s:g} s") from error
        raise CallFailed(f"raised {type(error).__name__}: {error}") from error


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
    if not isinstance(value, SupportsFloat):
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


async def _in_thread(work: Callable[[], Any], name: str) -> Any:
    """Run blocking ``work`` on a thread of its own.

    A thread a call rather than a pool: one that never returns costs the others nothing, and being a
    daemon it cannot keep the process alive. The caller bounds how many run at a time.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def deliver(answer: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((answer, error))

    def run() -> None:
        answer, error = None, None
        try:
            answer = work()
        except BaseException as raised:
            # Also SystemExit: a reward function that calls exit() must not end the run unnoticed.
            error = raised
        try:
            loop.call_soon_threadsafe(deliver, answer, error)
        except RuntimeError:
            if not loop.is_closed():
                raise

    threading.Thread(target=run, name=name, daemon=True).start()
    answer, error = await done
    if error is not None:
        raise CallFailed(f"raised {type(error).__name__}: {error}") from error
    return answer
