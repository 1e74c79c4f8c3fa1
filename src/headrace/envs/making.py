"""From an environment's class, or a function that makes one, to the environment.

In: what Python gave, the model's renderer, how tokens are drawn. Out: an environment with a ``run``, or a ConfigError
that says what is missing. Whatever is raised while it is made is its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from headrace.data.rendering import Renderer
from headrace.errors import ConfigError
from headrace.protocols import Environment
from headrace.types import Sampling


def made_environment(
    make: Callable[[Renderer, Sampling], Environment], renderer: Renderer, sampling: Sampling
) -> Environment:
    _check_maker(make, renderer, sampling)
    made = make(renderer, sampling)
    if not callable(getattr(made, "run", None)):
        raise ConfigError(
            f"environment: a {type(made).__name__} has no method run; give it async def run(self, task, policy)"
        )
    return made


def _check_maker(make: Callable[..., Any], *given: Any) -> None:
    """Before it is called: a TypeError that comes from inside it is another matter."""
    try:
        signature = inspect.signature(make)
    except ValueError:
        # Written in C: only the call tells.
        return
    try:
        signature.bind(*given)
    except TypeError as e:
        name = getattr(make, "__qualname__", type(make).__name__)
        raise ConfigError(
            f"environment: {name} cannot be made from what it is given, the model's renderer and how tokens are drawn "
            f"({e}): write __init__(self, renderer, sampling), or give a function of these two that makes it"
        ) from e
