"""What a module computes, told by its own code.

In: a module, and which of its children count. Out: one line such as ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``,
from running its class's forward once with stand-ins that note how they were made; None where it does to them what
stand-ins cannot tell. Neither weights nor inputs matter, so nothing small enough to be overlooked is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any


class Told:
    """Stands for a tensor and tells how it was made; its shape is of no account."""

    shape = (1, 2, 8)

    def __init__(self, how: str) -> None:
        self.how = how

    def __mul__(self, other: Told) -> Told:
        return Told(" * ".join(sorted((self.how, other.how))))

    def __add__(self, other: Told) -> Told:
        return Told("(" + " + ".join(sorted((self.how, other.how))) + ")")

    def _as_it_is(self, *_: Any) -> Told:
        return self

    view = transpose = reshape = contiguous = _as_it_is


class _StandIn:
    """Stands for a module: parts tell that they were called, all else is the module's."""

    def __init__(self, module: Any, parts: Collection[str], results: Callable[[str, Told], Any]) -> None:
        self._module, self._parts, self._results = module, parts, results

    def __getattr__(self, name: str) -> Any:
        if name not in self._parts:
            return getattr(self._module, name)
        return lambda *given, **named: self._results(name, given[0] if given else named["hidden_states"])


def how(
    module: Any,
    parts: Collection[str],
    *given: Any,
    made_by: Callable[[str, Told], Any] = lambda name, x: Told(f"{name}({x.how})"),
    standing_in: dict[str, Any] | None = None,
    **named: Any,
) -> str | None:
    """How the forward makes its first result of ``given``. ``made_by``: what a part returns; ``standing_in``: for names
    that its code looks up in its own file."""
    code = inspect.unwrap(type(module).forward)
    own = FunctionType(
        code.__code__,
        {**code.__globals__, **(standing_in or {})},
        code.__name__,
        code.__defaults__,
        code.__closure__,
    )
    own.__kwdefaults__ = code.__kwdefaults__
    try:
        made = own(_StandIn(module, parts, made_by), *given, **named)
        found: str = (made[0] if isinstance(made, tuple) else made).how
    except Exception:
        # It does something else to what stands for tensors, whatever that is.
        return None
    return found
