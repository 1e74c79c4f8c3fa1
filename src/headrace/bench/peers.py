"""Libraries that are measured beside Headrace, each in a process and, where asked for, an environment of its own.

In: what a comparison needs, and the interpreter it runs in: this one, or that of an environment where Headrace and the
peer are installed, since libraries pin what others need in other versions. Out: an error before anything is measured,
where something is missing there; and a run that ends within its deadline, or an error that says why not.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import ConfigError

_PROBE_S = 120
_PROBE = """
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
"""


def need(against: str, packages: Sequence[str], extras: str, python: Path | None = None) -> None:
    """Raise before minutes of measuring are spent on one side alone."""
    missing = lacking([*packages, *(["headrace"] if python else [])], python)
    if missing:
        where = f" where {python} looks" if python else ""
        raise ConfigError(f"--against {against}: {missing[0]} is not installed{where}; install {extras}")


def run(against: str, module: str, told: Sequence[str], *, python: Path | None, deadline_s: float) -> None:
    """Run a module of ours beside the peer. Raises ConfigError where it fails or does not end."""
    command = [str(python or sys.executable), "-m", module, *told]
    try:
        done = subprocess.run(
            command, env=environment(python), capture_output=True, text=True, timeout=deadline_s
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"--against {against}: the run had not ended after {deadline_s:g} s; free the GPU, or ask for less"
        ) from error
    if done.returncode:
        raise ConfigError(f"--against {against}: the run failed:\n{done.stderr[-3000:]}")


def environment(python: Path | None = None) -> dict[str, str]:
    """Where FlashInfer is missing vLLM's use of its sampler must be off; where it is there, vLLM decides."""
    given = dict(os.environ)
    if lacking(["flashinfer"], python):
        given["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return given


def lacking(packages: Sequence[str], python: Path | None) -> list[str]:
    """Those of the packages that the interpreter would not find."""
    if python is None:
        return [name for name in packages if importlib.util.find_spec(name) is None]
    command = [str(python), "-c", _PROBE, *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise ConfigError(f"--peer-python {python}: it is no Python that runs: {said[-500:]}") from error
    return done.stdout.split()
