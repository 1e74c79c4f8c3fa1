"""Roles as processes on this machine.

In: the roles to start. Out: a cluster of proxies for them, whose ``wait_failure`` tells of any death and
whose ``close`` leaves nothing running. One directory in shared memory belongs to the run: the control socket
and the weight segments lie there.

    how the controller ends      who cleans up
    close()                      this file: ask, SIGTERM, SIGKILL; then the directory
    killed, crashed              the guardian: SIGKILL to every role's group; then the directory
    both killed                  each role leaves when its socket closes; the next start sweeps the directory
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, DeadlineError, RoleError
from headrace.launch.channel import Listener
from headrace.launch.guardian import Guardian
from headrace.launch.proxies import (
    DEADLINES_S,
    RemoteEngine,
    RemoteScorer,
    RemoteStepScorer,
    RemoteTrainer,
)
from headrace.launch.ranked_trainer import RankedTrainer
from headrace.launch.role_process import Heartbeat, RoleProcess, RoleSpec
from headrace.protocols import Trainer
from headrace.types import RoleStatus
from headrace.weights.segment_directory import create_segment_directory, segment_root, sweep

__all__ = ["Heartbeat", "LocalCluster", "LocalLauncher", "RoleSpec"]


class LocalCluster:
    """The running roles."""

    def __init__(
        self,
        processes: Sequence[RoleProcess],
        *,
        listener: Listener,
        guardian: Guardian,
        directory: Path,
        close_deadline_s: float,
        deadlines_s: Mapping[str, float] = DEADLINES_S,
        num_minibatches: int = 1,
    ) -> None:
        callers = {
            kind: [p.caller for p in processes if p.spec.kind == kind]
            for kind in ("engine", "reference", "teacher", "scorer", "process")
        }
        self.engines = tuple(RemoteEngine(caller, deadlines_s) for caller in callers["engine"])
        self.scorers = tuple(RemoteScorer(caller, deadlines_s) for caller in callers["scorer"])
        references = [RemoteEngine(caller, deadlines_s) for caller in callers["reference"]]
        self.reference = references[0] if references else None
        judges = [RemoteStepScorer(caller, deadlines_s) for caller in callers["process"]]
        self.step_scorer = judges[0] if judges else None
        self.teachers = {
            caller.role.removeprefix("teacher-"): RemoteEngine(caller, deadlines_s)
            for caller in callers["teacher"]
        }
        trainers = [p for p in processes if p.spec.kind == "trainer"]
        self._trainer: Trainer | None = None
        if len(trainers) == 1:
            self._trainer = RemoteTrainer(trainers[0].caller, deadlines_s)
        elif trainers:
            self._trainer = RankedTrainer(trainers, num_minibatches=num_minibatches, deadlines_s=deadlines_s)
        self._processes = tuple(processes)
        self._listener = listener
        self._guardian = guardian
        self._directory = directory
        self._close_deadline_s = close_deadline_s
        self._closing: asyncio.Task[None] | None = None

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise RoleError("this cluster was started without a trainer; give it one to train")
        return self._trainer

    @property
    def heartbeats(self) -> Mapping[str, Heartbeat]:
        """The last word of each role that has spoken. A role silent for long may be busy: judge by whether
        ``progress`` grows, not by age."""
        return {p.spec.name: p.heartbeat for p in self._processes if p.heartbeat is not None}

    async def statuses(self) -> Mapping[str, RoleStatus]:
        """What each role last said of itself."""
        return {name: heartbeat.status for name, heartbeat in self.heartbeats.items()}

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by role, the guardian's too."""
        return {**{p.spec.name: p.pid for p in self._processes}, "guardian": self._guardian.pid}

    async def wait_failure(self) -> RoleError:
        """The first death of a role that nobody asked for; it stays the answer from then on. A run goes on without its
        process-reward model: whoever asks it is told."""
        failures = [p.failure for p in self._processes if p.spec.kind != "process"]
        done, _ = await asyncio.wait(failures, return_when=asyncio.FIRST_COMPLETED)
        return next(f.result() for f in failures if f in done)

    async def close(self) -> None:
        """Ends every role and leaves nothing behind; may be called more than once. Raises RoleError
        afterwards if a role could not close."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close cluster")
        # Whoever waits may be cancelled; the roles must still be stopped.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        stops = [process.stop(deadline_s=self._close_deadline_s) for process in self._processes]
        await _end_all(stops, self._listener, self._guardian, self._directory)


class LocalLauncher:
    """Starts roles as processes."""

    def __init__(
        self,
        roles: Sequence[RoleSpec],
        *,
        log_dir: Path,
        start_deadline_s: float = 300.0,
        close_deadline_s: float = 30.0,
        heartbeat_s: float = 1.0,
        deadlines_s: Mapping[str, float] = DEADLINES_S,
        directory: Path | None = None,
        num_minibatches: int = 1,
    ) -> None:
        """``directory``: from ``create_segment_directory``, where roles must know it beforehand; removed
        at the end. None: one is made. Several trainers are the ranks of one, in this order; each of a batch's
        ``num_minibatches`` is dealt out to them by itself."""
        names = [role.name for role in roles]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"roles must be given, each with a name of its own, not {names}")
        self._roles = tuple(roles)
        self._log_dir = log_dir
        self._start_deadline_s = start_deadline_s
        self._close_deadline_s = close_deadline_s
        self._heartbeat_s = heartbeat_s
        self._deadlines_s = deadlines_s
        self._directory = directory
        self._num_minibatches = num_minibatches

    async def spawn(self) -> LocalCluster:
        """Starts all roles at once; returns when every one is built, or stops them all and raises the first
        error."""
        sweep(segment_root())
        directory = self._directory or create_segment_directory()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        guardian = Guardian(self._log_dir / "guardian.log")
        guardian.remove(directory)
        listener = Listener()
        processes = [RoleProcess(role, log_dir=self._log_dir) for role in self._roles]
        try:
            await listener.open(directory)
            await self._start_all(processes, listener, guardian)
        except BaseException:
            kills = [process.kill() for process in processes]
            await asyncio.shield(asyncio.create_task(_end_all(kills, listener, guardian, directory)))
            raise
        return LocalCluster(
            processes,
            listener=listener,
            guardian=guardian,
            directory=directory,
            close_deadline_s=self._close_deadline_s,
            deadlines_s=self._deadlines_s,
            num_minibatches=self._num_minibatches,
        )

    async def _start_all(
        self, processes: Sequence[RoleProcess], listener: Listener, guardian: Guardian
    ) -> None:
        deadline_s = self._start_deadline_s
        starts = {
            process.spec.name: asyncio.create_task(
                process.start(listener, guardian, heartbeat_s=self._heartbeat_s, deadline_s=deadline_s)
            )
            for process in processes
        }
        tasks = list(starts.values())
        try:
            done, pending = await asyncio.wait(tasks, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        if pending:
            late = ", ".join(name for name, task in starts.items() if task in pending)
            raise DeadlineError(
                f"{late} did not start within {deadline_s:g} s; see the logs in {self._log_dir} or raise the "
                "start deadline"
            )


async def _end_all(
    ends: Sequence[Coroutine[Any, Any, None]], listener: Listener, guardian: Guardian, directory: Path
) -> None:
    """Await the end of every role, then take away what they shared; the first error is raised last."""
    outcomes = await asyncio.gather(*ends, return_exceptions=True)
    listener.close()
    shutil.rmtree(directory, ignore_errors=True)
    await asyncio.to_thread(guardian.dismiss)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
