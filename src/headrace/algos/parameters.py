"""Named numbers and choices of the loss library, and the one place where they are checked.

In: what was given for ``algo.options`` and the names that are in use. Out: the value of every parameter of
those, given or default, or a ConfigError. A parameter that nobody would read is refused as loudly as one of the
wrong type: a number that has no effect is worse than an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from headrace.errors import ConfigError

Value = float | str


@dataclass(frozen=True, slots=True)
class Parameter:
    """One entry of the table ``algo.options``."""

    name: str
    """``owner.field``: the owner is a loss, a correction, ``guard`` or ``truncated``."""
    default: Value
    meaning: str
    at_least: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    """Texts it may be; empty: it is a number."""

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
        if self.at_least is not None:
            return f"a number of at least {self.at_least:g}"
        return "a number" if self.above is None else f"a number above {self.above:g}"

    def accepts(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, (int, float)):
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
    options: Mapping[str, Any], *, known: Iterable[Parameter], in_use: Collection[str]
) -> dict[str, Value]:
    """Every parameter of the owners ``in_use``, by qualified name; raises ConfigError with a line per problem."""
    by_name = {parameter.name: parameter for parameter in known}
    given = flat(options)
    problems = [
        problem
        for name, value in given.items()
        if (problem := _problem(name, value, by_name, in_use)) is not None
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    values = {name: given.get(name, p.default) for name, p in by_name.items() if p.owner in in_use}
    return {name: value if by_name[name].choices else float(value) for name, value in values.items()}


def of_owner(values: Mapping[str, Value], owner: str) -> dict[str, Any]:
    """The owner's parameters by their own names, as the functions take them."""
    start = f"{owner}."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def _problem(name: str, value: Any, known: Mapping[str, Parameter], in_use: Collection[str]) -> str | None:
    parameter = known.get(name)
    if parameter is None:
        near = get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else "docs/losses.md lists every parameter."
        return f'algo.options has "{name}", which no loss or correction has: {remedy}'
    if parameter.owner not in in_use:
        return (
            f'algo.options has "{name}", but {parameter.owner} is not in use, so it would do nothing: switch '
            f"{parameter.owner} on (docs/losses.md says how), or leave it out."
        )
    if not parameter.accepts(value):
        return f'algo.options has "{name}" = {value!r}: set it to {parameter.takes}, or leave it out.'
    return None
