"""What commands have in common: the settings of a run, where text goes, figures as JSON, the traceback of an error."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headrace.errors import ConfigError

_UNBROKEN_COLUMNS = 1000
RunFile = Annotated[Path | None, typer.Argument(help="a TOML file; docs/settings.md lists every setting")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="section.field=value, may be repeated")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="write the figures here as JSON")]
Traceback = Annotated[bool, typer.Option("--traceback", help="show the traceback of an error")]


def output(*, stderr: bool = False) -> Console:
    """In a terminal's width; into a file or a pipe unbroken, so that lines can be searched."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNBROKEN_COLUMNS
    return console


def write_json(path: Path | None, figures: Any) -> None:
    if path is None:
        return
    value = asdict(figures) if is_dataclass(figures) and not isinstance(figures, type) else figures
    try:
        path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--json: {path} cannot be written ({e.strerror}); choose another file") from e
