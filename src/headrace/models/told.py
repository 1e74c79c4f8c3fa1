"""What a module computes, told by its own code.

In: a module, and which of its children count. Out: one line such as ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``,
from running its class's forward once with stand-ins that note how they were made; None where it does anything to them
that stand-ins do not know. Weights do not matter, so what they make too small to be seen is not overlooked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any


class Told:
    """Stands for a tensor and tells how it was made."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __mul__(self, other: Told) -> Told:
        return type(self)(" * ".join(sorted((self.how, other.how))))

    def __add__(self, other: Told) -> Told:
        return type(self)("(" + " + ".join(sorted((self.how, other.how))) + ")")


class ToldInHeads(Told):
    """In an attention, which lays its numbers out in heads and back; how it does is of no account."""

    shape = (1, 2, 8)

    def _as_it_is(self, *_: Any) -> Told:
        return self

    view = transpose = reshape = contiguous = _as_it_is


class _StandIn:
    """Stands for a module: parts tell that they were called, all else is the module's."""

    def __init__(self, module: Any, parts: Collection[str], made_by: Callable[..., Any]) -> None:
        self._module, self._parts, self._made_by = module, parts, made_by

    def __getattr__(self, name: str) -> Any:
        if name not in self._parts:
            return getattr(self._module, name)
        return lambda *given, **named: self._made_by(name, *given, **named)


def of_one(name: str, x: Told) -> Told:
    """What a part makes of the one thing it is given."""
    return type(x)(f"{name}({x.how})")


def how(
    module: Any,
    parts: Collection[str],
    *given: Any,
    made_by: Callable[..., Any] = of_one,
    standing_in: dict[str, Any] | None = None,
    first: bool = False,
    **named: Any,
) -> str | None:
    """How the forward makes its result, or the ``first`` of several, of what it is given. ``made_by``: what a part of
    this name returns; ``standing_in``: for names that the forward's code looks up in its own file, and that nothing
    wrapped around it may hide."""
    forward = type(module).forward
    if standing_in and (type(forward) is not FunctionType or "__wrapped__" in vars(forward)):
        return None
    try:
        if standing_in:
            forward = _with_globals(forward, standing_in)
        made = forward(_StandIn(module, parts, made_by), *given, **named)
        found: str = (made[0] if first else made).how
    except Exception:
        # It does something else to what stands for tensors, whatever that is.
        return None
    return found


def _with_globals(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    copied = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
