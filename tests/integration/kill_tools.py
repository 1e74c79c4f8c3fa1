"""What tests that kill processes share: a controller as a subprocess, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.weights.segment_directory import process_start, segment_root

DEADLINE_S = 60.0


def vowels(completions: list[str]) -> list[float]:
    """A reward that differs between the answers of an untrained model, so that steps move the weights."""
    return [float(sum(text.count(vowel) for vowel in "aei")) for text in completions]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s for {what}"
        time.sleep(0.01)


def workers_of(run_dir: Path) -> dict[str, int]:
    """Process ids by name of the roles and the guardian of a run: whoever writes to one of its logs."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/fd/1"):
        pid = int(entry.parts[2])
        try:
            log = Path(os.readlink(entry))
        except OSError:
            continue  # ended meanwhile, or another user's
        if log.parent == run_dir / "logs" and process_start(pid) is not None:
            found[log.stem] = pid
    return found


def segment_directories(controller: int) -> list[Path]:
    """What a controller left in shared memory: its weight segments and its control socket."""
    return list(segment_root().glob(f"headrace-*-{controller}-*"))


class Life:
    """One controller, from its start to its end."""

    def __init__(self, command: Sequence[str], run_dir: Path) -> None:
        self.run_dir = run_dir
        self.errors = run_dir.with_name(f"{run_dir.name}.stderr")
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "PYTHONUNBUFFERED": "1",
                },
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)

    def wait_for(self, wanted: Callable[[str], bool], count: int = 1) -> str:
        """The ``count``-th wanted line from here on; fails if the controller ends before it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            count -= wanted(line)
            if count == 0:
                return line
        code = self.process.wait(DEADLINE_S)
        raise AssertionError(f"the controller ended early (exit code {code}): {self.errors.read_text()}")

    def kill(self, *names: str) -> None:
        """SIGKILL to the controller or to workers, by name; one that is not there (yet) is left out."""
        workers = workers_of(self.run_dir)
        for name in names:
            if name == "controller":
                self.process.kill()
            elif name in workers:
                os.kill(workers[name], signal.SIGKILL)

    def end(self) -> tuple[int, str, str]:
        """(exit code, rest of the output, errors) once the controller has ended."""
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, output, self.errors.read_text()

    def expect_no_workers(self) -> None:
        wait_until(lambda: not workers_of(self.run_dir), f"the workers of {self.run_dir.name} to end")

    def expect_nothing_left(self) -> None:
        self.expect_no_workers()
        assert segment_directories(self.process.pid) == []
