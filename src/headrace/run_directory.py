"""One directory per run: settings, journal, checkpoints, events, logs, and who is using it.

    runs/NAME/settings.toml    what the run was asked to do
              environment      the name of the environment that Python gave it; not there: none
              events.jsonl     what happened, for people and plots
              journal/         what happened, for recovery
              checkpoints/     step-NNNNNNNN, each loadable with from_pretrained
              logs/            one file per worker; controller.log has what environments and rewards raised
              summary.json     the closing summary

A lock that dies with its process keeps two controllers out of one directory.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from headrace.config import Settings, changed_fields, load, to_toml
from headrace.errors import CheckpointError, ConfigError


class RunDirectory:
    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, settings: Settings, *, environment: str | None = None) -> RunDirectory:
        """A new run; ``environment`` names the one that Python gives it."""
        name = settings.run.name or time.strftime("%Y%m%d-%H%M%S")
        path = Path(settings.run.dir) / name
        with _locked(path) as lock:
            # One that never got as far as its first checkpoint has nothing to lose.
            if latest_checkpoint(path) is not None:
                raise ConfigError(
                    f"run.name: {path} already holds a run; resume it with --resume {path}, "
                    "or set another run.name"
                )
            directory = cls(path, lock)
            directory.keep(settings)
            if environment is not None:
                _write(path / "environment", environment)
            else:
                _remove(path / "environment")
            return directory

    @classmethod
    def reopen(
        cls, path: Path, settings: Settings | None, *, environment: str | None = None
    ) -> tuple[RunDirectory, Settings]:
        """A run to go on with, and the settings for it; nothing is changed yet. ``settings`` None takes those it was
        started with; an ``environment`` cannot be kept, so one must be given again to a run that had one."""
        file = path / "settings.toml"
        if not holds_run(path):
            raise ConfigError(f"resume: {path} holds no run (there is no settings.toml); check the path")
        with _locked(path) as lock:
            before = load(file)
            _check_environment(path, environment)
            if settings is None:
                return cls(path, lock), before
            changed = changed_fields(before, settings)
            if changed:
                told = [f"{name} is {new}, the run has {old}" for name, (old, new) in changed.items()]
                raise ConfigError(
                    f"resume: {'; '.join(told)}: set {'it' if len(told) == 1 else 'them'} back, or start a new run "
                    f"from the last checkpoint of {path}"
                )
            # A run stays where it is, whatever it would be called if it were begun now.
            place = {"name": before.run.name, "dir": before.run.dir}
            return cls(path, lock), settings.model_copy(update={"run": settings.run.model_copy(update=place)})

    def keep(self, settings: Settings) -> None:
        """The run goes on under these, and so does the next resume."""
        _write(self.path / "settings.toml", to_toml(settings))

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    def latest_checkpoint(self) -> Path | None:
        return latest_checkpoint(self.path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        _write(self.path / "summary.json", json.dumps(summary, indent=2, default=str) + "\n")

    def close(self) -> None:
        self._lock.close()


def holds_run(path: Path) -> bool:
    return (path / "settings.toml").exists()


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run; None: there is none."""
    return max((run_dir / "checkpoints").glob("step-*"), default=None)


def _check_environment(path: Path, given: str | None) -> None:
    file = path / "environment"
    before = file.read_text(encoding="utf-8") if file.exists() else None
    if before and not given:
        raise ConfigError(
            f"resume: the run in {path} has an environment of its own ({before}), without which its attempts would "
            "be one turn each: give it again, from Python with headrace.train(environment=..., resume=...)"
        )
    if given and not before:
        raise ConfigError(
            f"resume: the run in {path} was started without an environment of its own: leave environment = {given} "
            "out, or start a new run from its last checkpoint"
        )


@contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """The lock on a directory, made if need be; it is kept unless the block fails."""
    lock = _lock(path)
    try:
        yield lock
    except BaseException:
        lock.close()
        raise


def _lock(path: Path) -> IO[str]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / "lock", "a+", encoding="utf-8")  # noqa: SIM115 (held open for the whole run)
    except OSError as e:
        raise _unwritable(path, e) from e
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise ConfigError(
            f"run.name: {path} is in use by process {owner}; wait for it, stop it, or set another run.name"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a resume reads what the last one wrote."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    except OSError as e:
        raise _unwritable(path, e) from e


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        raise _unwritable(path, e) from e


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"run.dir: {path} cannot be written ({error.strerror}); free some disk space or choose another run.dir"
    )
