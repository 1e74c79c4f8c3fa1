"""Directories in shared memory that can be told from rubbish after any kind of exit.

A directory's name carries who owns it: process namespace, process id and that process's start time (ids are
used again, ids with start times are not). ``sweep`` removes those whose owner is dead. It leaves alone
whatever it cannot judge: other users' directories and those of other process namespaces, which may
share ``/dev/shm`` while their process ids mean nothing here.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

PREFIX = "headrace"
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-(\d+)-\w+")


def segment_root() -> Path:
    """``/dev/shm`` where it can be written, else the directory for temporary files."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def create_segment_directory(root: Path | None = None) -> Path:
    """A new directory owned by this process, readable by this user alone."""
    pid = os.getpid()
    prefix = f"{PREFIX}-{_pid_namespace()}-{pid}-{process_start(pid) or 0}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=root or segment_root()))


def sweep(root: Path) -> list[Path]:
    """Remove the directories under ``root`` whose owner is dead; returns them."""
    removed = []
    for path in root.glob(f"{PREFIX}-*"):
        if _is_orphan(path):
            # Another start may be sweeping too: what is gone already is as good as removed.
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def process_start(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot; None: there is no such process.

    0 where the system does not tell: then only the id is compared.
    """
    if sys.platform != "linux":
        return 0 if _exists(pid) else None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name sits in parentheses and may hold anything, blanks and parentheses included.
    fields = stat[stat.rindex(")") + 2 :].split()
    state, start = fields[0], int(fields[19])
    return None if state in "ZX" else start


def _is_orphan(path: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    if match is None:
        return False
    namespace, pid, start = map(int, match.groups())
    try:
        mine = path.lstat().st_uid == os.getuid()
    except FileNotFoundError:
        return False
    return mine and namespace == _pid_namespace() and process_start(pid) != start


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
