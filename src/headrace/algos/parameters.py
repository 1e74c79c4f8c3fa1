"""Named parameters in a table of the settings, and the one place where they are checked.

In: what was given for a table (``algo.options``, ``pivots.options``) and who is in use. Out: the value of every
parameter of those, given or default, or a ConfigError. A parameter that nobody would read is refused as loudly as one
of the wrong type: a number that has no effect is worse than an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any

from headrace.errors import ConfigError

Value = float | str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One entry of a table."""

    name: str
    """``owner.field``: the owner is a loss, a correction or another part of a run; or a field alone, where a table has
    one owner."""
    default: Value
    """Also says what it takes: a float any number, an int whole ones, a text one of ``choices``, a tuple texts."""
    meaning: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        return self.name.partition(".")[0]

    @property
    def field(self) -> str:
        return self.name.partition(".")[2]

    @property
    def takes(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if isinstance(self.default, tuple):
            return "a list of texts"
        kind = "a whole number" if isinstance(self.default, int) else "a number"
        if self.at_least is not None and self.at_most is not None:
            return f"{kind} from {self.at_least:g} to {self.at_most:g}"
        if self.at_least is not None:
            return f"{kind} of at least {self.at_least:g}"
        return kind if self.above is None else f"{kind} above {self.above:g}"

    def accepts(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if isinstance(self.default, tuple):
            return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
        numbers = int if isinstance(self.default, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, numbers) or not isfinite(value):
            return False
        if self.at_most is not None and value > self.at_most:
            return False
        high_enough = self.at_least is None or value >= self.at_least
        return high_enough and (self.above is None or value > self.above)


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"tis": {"cap": 2}}`` as ``{"tis.cap": 2}``: TOML and the command line read a dot as a table."""
    entries: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        entries |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return entries


def resolve(
    options: Mapping[str, Any],
    *,
    known: Iterable[Parameter],
    in_use: Collection[str] | None = None,
    table: str = "algo.options",
) -> dict[str, Value]:
    """Every parameter of the owners ``in_use`` (None: all), by name; raises ConfigError with a line per problem."""
    by_name = {parameter.name: parameter for parameter in known}
    useful = {name: p for name, p in by_name.items() if in_use is None or p.owner in in_use}
    given = flat(options)
    found = (_problem(name, value, by_name, useful) for name, value in given.items())
    problems = [f'{table} has "{name}"{what}' for name, what in zip(given, found, strict=True) if what]
    if problems:
        raise ConfigError("\n".join(problems))
    return {name: _converted(given.get(name, p.default), p) for name, p in useful.items()}


def _converted(value: Any, parameter: Parameter) -> Value:
    if isinstance(parameter.default, tuple):
        return tuple(value)
    return float(value) if isinstance(parameter.default, float) else value


def of_owner(values: Mapping[str, Value], owner: str) -> dict[str, Any]:
    """The owner's parameters by their own names, as the functions take them."""
    start = f"{owner}."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def _problem(
    name: str, value: Any, known: Mapping[str, Parameter], useful: Mapping[str, Parameter]
) -> str | None:
    """What is wrong with an entry, and the remedy; None: nothing."""
    parameter = known.get(name)
    if parameter is None:
        near = get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}? Otherwise use" if near else "use"
        return f", which is unknown: {remedy} one of {', '.join(useful)}."
    if name not in useful:
        return (
            f", but {parameter.owner} is not in use, so it would do nothing: switch {parameter.owner} on "
            "(docs/losses.md says how), or leave it out."
        )
    return (
        None if parameter.accepts(value) else f" = {value!r}: set it to {parameter.takes}, or leave it out."
    )
