"""From ``module:function`` or ``file.py:function`` to the function, or an error that says what is missing."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import ConfigError


def resolve(reference: str, *, what: str = "reward") -> Callable[..., Any]:
    """The callable that ``reference`` names; ``what`` is the setting that errors speak of."""
    module_name, colon, attribute = reference.rpartition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{what} {reference!r} is not of the form module:function or file.py:function")
    module = (
        _from_file(Path(module_name), what) if module_name.endswith(".py") else _from_name(module_name, what)
    )
    names = vars(module)
    if attribute not in names:
        near = difflib.get_close_matches(attribute, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"define it in {module_name}"
        raise ConfigError(f"{what} {reference!r}: {module_name} has no {attribute!r}; {hint}")
    if not callable(names[attribute]):
        raise ConfigError(f"{what} {reference!r} is a {type(names[attribute]).__name__}, not a function")
    return names[attribute]


def function_name(reference: str) -> str:
    """What a reward given by reference is called in logs: the function's own name."""
    return reference.rpartition(":")[2]


def _from_name(module_name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ConfigError(
                f"{what} module {module_name!r} is not importable: install it, or name its file "
                "(path/to/file.py:function)"
            ) from error
        raise ConfigError(
            f"{what} module {module_name!r} imports {error.name!r}, which is missing: install it"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{what} module {module_name!r} raised {type(error).__name__} on import: {error}"
        ) from error


def _from_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{what} file {path} does not exist: check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{what} file {path} raised {type(error).__name__} when run: {error}") from error
    return module
