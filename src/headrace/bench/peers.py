"""Libraries that are measured beside Headrace, which are there or not.

In: what a comparison needs. Out: an error before anything is measured, where it is missing, and the environment a
peer's process runs in.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

from headrace.errors import ConfigError


def need(against: str, packages: Sequence[str], extras: str) -> None:
    """Raise before minutes of measuring are spent on one side alone."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"--against {against}: {package} is not installed; install {extras}")


def environment() -> dict[str, str]:
    """Where FlashInfer is missing vLLM's use of its sampler must be off; where it is there, vLLM decides."""
    given = dict(os.environ)
    if importlib.util.find_spec("flashinfer") is None:
        given["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return given
