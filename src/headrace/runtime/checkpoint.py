"""Checkpoints of the whole run, and recovery from the last one plus the journal.

A checkpoint is a directory ``step-NNNNNNNN`` that holds the trainer's files and the controller's state
as of one instant. It is written under another name and renamed when every byte is on disk, so a
directory with the final name is complete. The journal continues in the segment of that step from that
same instant. Recovery restores the newest checkpoint, folds the later records over it, and returns the
batches that had been trained since: the weights do not have them any more, so they are trained
again, in the same order.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from headrace import wire
from headrace.errors import CheckpointError
from headrace.protocols import Trainer
from headrace.runtime.journal import Journal, read, segment_steps
from headrace.runtime.state import RunState

STATE_FILE = "controller.state"


class CheckpointStore:
    def __init__(self, run_dir: Path, *, keep: int) -> None:
        self.directory = run_dir / "checkpoints"
        self.journal_directory = run_dir / "journal"
        self._keep = keep

    def steps(self) -> list[int]:
        names = (path.name.removeprefix("step-") for path in self.directory.glob("step-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    async def save(self, state: RunState, trainer: Trainer, journal: Journal) -> Path:
        """All of it or nothing: a failure leaves the earlier checkpoints and the journal as they were."""
        step, final = state.step, self.path(state.step)
        if final.exists():
            # Nothing was trained since, so that checkpoint and the journal hold everything.
            return final
        # An attempt to save this step that was cut short has left records in its segment; they are in ``state``.
        frame = wire.encode({"state": state.snapshot(), "journal_bytes": journal.rotate(step)})
        partial = self._partial(step)
        try:
            self._discard_partials()
            partial.mkdir(parents=True)
            await trainer.save(partial)
            _write_durably(partial / STATE_FILE, frame)
            _sync_directory(partial)
            os.replace(partial, final)
            _sync_directory(self.directory)
            self._prune(journal)
        except OSError as e:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.directory} ({e}); "
                "free some disk space and resume: the last checkpoint and the journal are intact"
            ) from e
        finally:
            self._discard_partials()
        return final

    def _prune(self, journal: Journal) -> None:
        steps = self.steps()
        for step in steps[: -self._keep]:
            # Renamed first: a directory that is half removed must not look complete.
            os.replace(self.path(step), self._partial(step))
        journal.prune(before_step=steps[-self._keep :][0])

    def _partial(self, step: int) -> Path:
        return self.directory / f"partial-{step:08d}"

    def _discard_partials(self) -> None:
        for path in self.directory.glob("partial-*"):
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    state: RunState
    checkpoint: Path | None
    """What the trainer loads; None: nothing was ever saved."""
    batches: tuple[tuple[int, tuple[int, ...]], ...]
    """(step, groups) to train again before anything else."""
    segment: int
    """The journal segment to continue in."""


def recover(store: CheckpointStore) -> Recovery:
    """What the last controller of this run knew."""
    steps = store.steps()
    if not steps:
        return Recovery(state=RunState(), checkpoint=None, batches=(), segment=0)
    checkpoint = store.path(steps[-1])
    state, journal_bytes = _read_state(checkpoint)
    batches: dict[int, tuple[int, ...]] = {}
    for record in read(store.journal_directory, steps[-1], skip_bytes=journal_bytes):
        if record["kind"] == "take":
            batches[record["step"]] = tuple(record["groups"])
        elif record["kind"] != "trained":
            state.apply(record)
    state.ledger.check()
    segments = segment_steps(store.journal_directory)
    return Recovery(
        state=state,
        checkpoint=checkpoint,
        batches=tuple(sorted(batches.items())),
        segment=segments[-1] if segments else steps[-1],
    )


def step_reached(store: CheckpointStore) -> int:
    """The step a resumed run is at once it has trained again what the journal holds."""
    recovery = recover(store)
    return recovery.batches[-1][0] if recovery.batches else recovery.state.step


def _read_state(checkpoint: Path) -> tuple[RunState, int]:
    """The controller's state, and how much of the checkpoint's journal segment is older than it."""
    try:
        saved = wire.decode((checkpoint / STATE_FILE).read_bytes())
        return RunState.restore(saved["state"]), saved["journal_bytes"]
    except Exception as e:
        # Damaged bytes fail in as many ways as there are bytes.
        raise CheckpointError(
            f"{checkpoint / STATE_FILE} cannot be read ({e}); remove {checkpoint} to resume from the one before"
        ) from e


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
