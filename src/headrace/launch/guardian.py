"""Cleans up after a controller that had no time to: a process of its own that only waits.

In, over a pipe from the controller, one line each:

    watch PID START    a child's process group, and when that child started
    remove PATH        a directory to delete
    done               an orderly end: leave everything alone and exit

When the pipe closes without ``done``, or the controller is no longer the parent (a fork of it may hold
the pipe open), the controller is gone, killed perhaps: every watched group is killed, then every directory
removed. This file runs as a script with the standard library alone, so it costs a few megabytes and
cannot be brought down by anything the run imports.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 1.0
_GROUPS_DEADLINE_S = 10.0


class Guardian:
    """The controller's end. A guardian that was killed is done without: children still leave when their
    socket closes, and the next start sweeps the directories."""

    def __init__(self, log: Path) -> None:
        with log.open("ab") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, pid: int) -> None:
        self._tell(f"watch {pid} {_start_of(pid)}")

    def remove(self, directory: Path) -> None:
        self._tell(f"remove {directory}")

    def dismiss(self, deadline_s: float = 10.0) -> None:
        """An orderly end."""
        self._tell("done")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(deadline_s)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, str] = {}
    directories: list[str] = []
    for line in _lines(controller=int(sys.argv[1])):
        verb, _, rest = line.partition(" ")
        if verb == "watch":
            pid, start = rest.split()
            groups[int(pid)] = start
        elif verb == "remove":
            directories.append(rest)
        elif verb == "done":
            return
    _kill(groups)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _lines(controller: int) -> Iterator[str]:
    """What the controller says, until it is gone."""
    rest = b""
    while True:
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if readable:
            data = os.read(0, 65536)
            if not data:
                return
            *whole, rest = (rest + data).split(b"\n")
            yield from (line.decode() for line in whole)
        elif os.getppid() != controller:
            return


def _kill(groups: dict[int, str]) -> None:
    """Kill what is left of each group, and wait for the leaders' end so that nothing is written any more."""
    # A leader that ended may have left its group behind, and its id may have gone to a stranger: the start
    # time tells the two apart.
    leaders = [pid for pid, start in groups.items() if _start_of(pid) in (start, "gone")]
    deadline = time.monotonic() + _GROUPS_DEADLINE_S
    while leaders and time.monotonic() < deadline:
        for pid in leaders:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        leaders = [pid for pid in leaders if _start_of(pid) != "gone"]
        time.sleep(0.01)


def _start_of(pid: int) -> str:
    """Start time of a living process (field 22 of its stat line): with the id, it names one for good."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "gone" if sys.platform == "linux" or not _exists(pid) else "unknown"
    return "gone" if fields[0] in "ZX" else fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
