"""What a figure is worth nothing without: what was run, when, of which source, and on what.

Out: plain values that go into the same file as the figures, and a line for people to quote.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
_LIBRARIES = ("torch", "transformers", "triton", "flash-attn-4", "quack-kernels", "vllm", "trl")
_GIT_S = 20


def taken(bench: str, *, on_gpu: bool) -> dict[str, Any]:
    """Of the command that runs in this process: now, when its figures are written. ``on_gpu``: where it measured."""
    return {
        "bench": bench,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": written(time.time()),
        "device": device(on_gpu),
        "source": fingerprint(PACKAGE, "**/*.py")[:12],
        "commit": commit(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def written(moment_s: float) -> str:
    """A moment in a form that sorts by time."""
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def quoted(facts: Mapping[str, Any]) -> str:
    """One line, to stand beside a figure."""
    source = f"commit {facts['commit']}" if facts["commit"] else f"source {facts['source']}"
    libraries = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{facts['command']}; {facts['date']}; {facts['device']}; {source}; {libraries}"


def device(on_gpu: bool) -> str:
    if on_gpu:
        import torch

        return torch.cuda.get_device_name()
    return f"{len(os.sched_getaffinity(0))} cores, {_processor()}"


def versions() -> dict[str, str]:
    """Of the libraries that are installed here and matter to a figure."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def fingerprint(folder: Path, pattern: str) -> str:
    """Of source files, by name and content."""
    found = hashlib.sha256()
    for file in sorted(folder.glob(pattern)):
        found.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return found.hexdigest()


def commit() -> str | None:
    """Of the checkout that the package lies in, marked where files differ from it; None: it lies in none."""
    try:
        # An environment inside somebody else's checkout is not a part of it.
        _git("ls-files", "--error-unmatch", "errors.py")
        return _git("describe", "--always", "--dirty", "--abbrev=10", "--match=")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    command = ["git", "-C", str(PACKAGE), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
