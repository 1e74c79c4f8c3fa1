"""Values from a file, the command line or Python into checked ``Settings``.

In: a TOML file and ``section.field=value`` texts, or a mapping. Out: ``Settings``, or one ConfigError
whose lines each name a setting, what was given and what to do. Nothing is guessed: an unknown name is
an error that suggests the nearest known one, and a value of the wrong type is never converted.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.config.moved import MOVED
from headrace.config.names import (
    FIELDS,
    SECTIONS,
    expected,
    may_be_left_out,
    nearest,
    takes_table,
    takes_text,
)
from headrace.config.settings import Settings
from headrace.config.toml import to_value
from headrace.errors import ConfigError

_UNSET = object()
_SHOWN_CHARS = 60


def load(path: Path | None, overrides: Sequence[str] = (), *, training: bool = True) -> Settings:
    """Settings from a TOML file (None: all defaults), then ``section.field=value`` overrides in order.

    A value is read as TOML where it is TOML and as text otherwise; an empty one restores the default.
    ``training=False`` allows what only training forbids (greedy or truncated sampling).
    """
    pairs = [*_leaves({} if path is None else _read(path)), *map(_parse_override, overrides)]
    return _build(pairs, training=training)


def from_dict(values: Mapping[str, Any], *, training: bool = True) -> Settings:
    """Settings from Python values, by section (``{"run": {"seed": 1}}``) or name (``{"run.seed": 1}``)."""
    return _build(list(_leaves(values)), training=training)


def laid_over(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """The settings with these values, by section or name, in place of their own."""
    own = settings.model_dump(mode="json", exclude_none=True)
    return _build([*_leaves(own), *_leaves(values)], training=True)


def require(settings: Settings, *names: str) -> None:
    """Raise ConfigError unless each of these settings has been given."""
    values = settings.model_dump()
    for name in names:
        section, field = name.split(".")
        if values[section][field] in (None, (), ""):
            raise ConfigError(
                f"{name} is not set: give it in the run file or with --set {name}=... ({expected(name)})."
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise ConfigError(f"The settings file {path} does not exist: check the path.") from None
    except OSError as error:
        raise ConfigError(f"The settings file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The settings file {path} is not UTF-8 text: save it as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The settings file {path} is not valid TOML: {error}.") from None


def _parse_override(text: str) -> tuple[str, Any]:
    name, equals, raw = (part.strip() for part in text.partition("="))
    if not equals or not name:
        raise ConfigError(f'The override "{text}" has no value: write it as section.field=value.')
    if not raw:
        return name, _UNSET
    try:
        document = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return name, raw
    value = document["value"]
    # A run may well be called 2026: where text is expected, everything unquoted is text.
    meant_as_text = name in FIELDS and takes_text(name) and not isinstance(value, str)
    return name, raw if meant_as_text or len(document) > 1 else value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested tables; a setting that is itself a table stays whole."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in FIELDS and (value or name in SECTIONS):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _build(pairs: Sequence[tuple[str, Any]], *, training: bool) -> Settings:
    tree: dict[str, dict[str, Any]] = {}
    problems = []
    for name, value in pairs:
        section, *path = name.split(".")
        field = ".".join([section, *path[:1]])
        if field in FIELDS and (len(path) == 1 or takes_table(field)):
            _put(tree.setdefault(section, {}), path, value)
        else:
            problems.append(_unknown(name))
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return Settings.model_validate(tree, context={"training": training})
    except ValidationError as error:
        raise ConfigError("\n".join(_sentences(error))) from None


def _put(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set or unset one entry, without touching the caller's tables."""
    key, *rest = path
    if rest:
        inner = table.get(key, {})
        # Something that is no table stays as it is: validation will name it.
        if isinstance(inner, Mapping):
            table[key] = dict(inner)
            _put(table[key], rest, value)
    elif value is _UNSET:
        table.pop(key, None)
    else:
        table[key] = value


def _unknown(name: str) -> str:
    if name in SECTIONS:
        example = next(field for field in FIELDS if field.startswith(f"{name}."))
        return f"{name} is a section, not a setting: set its fields by name, for example {example}."
    if name in MOVED:
        return f"{name} is no longer a setting: {MOVED[name]}."
    guess = nearest(name)
    remedy = f"did you mean {guess}?" if guess else "docs/settings.md lists every setting."
    return f"{name} is not a setting: {remedy}"


def _sentences(error: ValidationError) -> list[str]:
    """One sentence per setting; a list with two bad entries is still one setting."""
    given: dict[str, Any] = {}
    for detail in error.errors(include_url=False, include_context=False):
        name = ".".join(map(str, detail["loc"][:2]))
        given.setdefault(name, detail["input"])
    return [_refusal(name, value) for name, value in given.items()]


def _refusal(name: str, value: Any) -> str:
    otherwise = ", or leave it out" if may_be_left_out(name) else ""
    return f"{name} was given {_show(value)}: set it to {expected(name)}{otherwise}."


def _show(value: Any) -> str:
    try:
        text = to_value(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
