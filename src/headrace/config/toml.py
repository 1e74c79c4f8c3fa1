"""Settings as TOML text, which ``tomllib`` reads back to equal settings.

The standard library reads TOML but does not write it; only what settings can hold is written here.
A setting that is not set has no line, since TOML cannot write None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.config.settings import Settings


def to_toml(settings: Settings) -> str:
    """Every setting, one table per section; reading it back gives equal settings."""
    lines = []
    for section, values in settings.model_dump().items():
        lines.append(f"[{section}]")
        lines.extend(f"{name} = {to_value(value)}" for name, value in values.items() if value is not None)
        lines.append("")
    return "\n".join(lines)


def to_value(value: Any) -> str:
    """One value in TOML's spelling."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(to_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(k)} = {to_value(v)}" for k, v in value.items()) + "}"
    raise TypeError(f"{type(value).__name__} has no TOML spelling")


def _text(value: str) -> str:
    # JSON escapes are TOML escapes, save that TOML also wants DEL escaped and knows no surrogates.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
