"""Libraries that are measured beside Headrace, each in a process and, where asked for, an environment of its own.

In: what a comparison needs, and the interpreter it runs in: this one, or that of an environment where Headrace and the
peer are installed, since libraries pin what others need in other versions. Out: an error before anything is measured,
where something is missing there or its Headrace would measure something else; and a run that has written its result
when it ends, or an error that says why not. When a run is over nothing of it is left: a process that keeps memory of
the GPU would spoil what is measured next.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.bench import provenance
from headrace.errors import ConfigError

_PROBE_S, _KILL_S = 120, 60
_PROBE = """
import importlib.util, json, sys
print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]))
"""
_ASK_FINGERPRINT = """
import json
from headrace.bench import peers
print(json.dumps(getattr(peers, "fingerprint", str)()))
"""


def need(against: str, packages: Sequence[str], extras: str, python: Path | None = None) -> None:
    """Raise before minutes of measuring are spent on one side alone."""
    missing = lacking([*packages, *(["headrace"] if python else [])], python)
    if missing:
        where = f" where {python} looks" if python else ""
        raise ConfigError(f"--against {against}: {missing[0]} is not installed{where}; install {extras}")
    if python is not None and _asked(python, _ASK_FINGERPRINT) != fingerprint():
        raise ConfigError(
            f"--peer-python {python}: the Headrace installed there has other benchmarks; install this one there"
        )


def fingerprint() -> str:
    """Of the benchmarks' source: what different ones have measured is not to be compared."""
    return provenance.fingerprint(Path(__file__).parent, "*.py")


def run(
    against: str, module: str, told: Sequence[str], result: Path, *, python: Path | None, deadline_s: float
) -> None:
    """Run a module of ours beside the peer until it has written ``result``. Raises ConfigError where it does not."""
    command = [_interpreter(python), "-m", module, *told]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        # Its own session, so that what it starts can be ended with it; a file, since a pipe lasts as long as those do.
        peer = subprocess.Popen(
            command, env=environment(python), stdout=said, stderr=said, start_new_session=True
        )
        try:
            peer.wait(deadline_s)
            outcome = f"failed (exit status {peer.returncode})"
        except subprocess.TimeoutExpired:
            outcome = f"had not ended after {deadline_s:g} s; free the GPU, or ask for less"
        finally:
            _end(peer)
        if peer.returncode or not result.exists():
            said.seek(0)
            raise ConfigError(f"--against {against}: the run {outcome}:\n{said.read()[-3000:]}")


def _end(peer: subprocess.Popen[bytes]) -> None:
    """It and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(peer.pid, signal.SIGKILL)
    try:
        peer.wait(_KILL_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"process {peer.pid} of a peer still lives {_KILL_S} s after it was killed; look at the GPU's driver"
        ) from error


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
    missing: list[str] = _asked(python, _PROBE, *packages)
    return missing


def _asked(python: Path, program: str, *told: str) -> Any:
    """What the program prints there, as JSON."""
    command = [_interpreter(python), "-c", program, *told]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise ConfigError(f"--peer-python {python}: it is no Python that runs: {said[-500:]}") from error


def process_age_s() -> float:
    """Seconds since this process was started, imports and all (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _interpreter(python: Path | None) -> str:
    """A path, never looked up elsewhere; links are left alone, since an environment's interpreter is one."""
    return sys.executable if python is None else str(python.absolute())
