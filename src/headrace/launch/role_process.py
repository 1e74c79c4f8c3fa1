"""One role's process as its controller sees it: started, talked to, mourned, stopped.

In: a ``RoleSpec``. Out: a ``Caller`` to the role, its last heartbeat, and, when it dies unasked, a RoleError
that says how and shows the end of its log. The process leads a session and process group of its own: Ctrl-C
at the terminal does not reach it, and whatever it starts is stopped with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import headrace
from headrace.errors import DeadlineError, RoleError
from headrace.launch.channel import TOKEN_VARIABLE, Listener
from headrace.launch.guardian import Guardian
from headrace.launch.role_methods import RoleKind
from headrace.launch.rpc import Caller, RemoteTraceback
from headrace.types import RoleStatus

_LOG_TAIL_BYTES = 4000
_LAST_WORDS_DEADLINE_S = 5.0
_SIGNAL_DEADLINE_S = 5.0
_log = logging.getLogger(__name__)


def torch_defaults(torch_version: str) -> dict[str, str]:
    """What torch is told where the environment does not say it. Before 2.13 its record of collectives, kept to explain
    hangs, is no place for two threads: where a process has two groups of Gloo, as a trainer of several ranks has that
    broadcasts weights, it can end the process (pytorch/pytorch#179449)."""
    major, minor = (int(number) for number in torch_version.split(".")[:2])
    return {"TORCH_FR_BUFFER_SIZE": "0"} if (major, minor) < (2, 13) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A role to start in a process of its own."""

    name: str
    """``engine-0``, ``trainer``, ...; unique in the cluster."""
    kind: RoleKind
    factory: str
    """``module:function``; called with ``settings`` it returns the role object, or a coroutine of it."""
    settings: Mapping[str, Any]
    """Only what ``wire`` carries."""
    num_threads: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the controller's environment."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    status: RoleStatus
    received_at_s: float
    """On ``time.monotonic``."""


class RoleProcess:
    def __init__(self, spec: RoleSpec, *, log_dir: Path) -> None:
        self.spec = spec
        self.log = log_dir / f"{spec.name}.log"
        self.heartbeat: Heartbeat | None = None
        self.failure: asyncio.Future[RoleError] = asyncio.get_running_loop().create_future()
        self._caller: Caller | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._log_start = 0
        self._unhandled = ""
        self._stopping = False

    @property
    def caller(self) -> Caller:
        assert self._caller is not None, "the role has not been started"
        return self._caller

    @property
    def pid(self) -> int:
        assert self._process is not None, "the role has not been started"
        return self._process.pid

    async def start(
        self, listener: Listener, guardian: Guardian, *, heartbeat_s: float, deadline_s: float
    ) -> None:
        """Returns when the role is built; raises what its factory raised."""
        arrival = listener.expect(self.spec.name)
        await self._launch(listener)
        guardian.watch(self.pid)
        exit_ = asyncio.create_task(self._wait_exit(), name=f"{self.spec.name} exit")
        first: set[asyncio.Future[Any]] = {arrival, exit_}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exit_.cancel()
        if not arrival.done():
            raise self._obituary()
        self._caller = Caller(
            self.spec.name, arrival.result(), on_event=self._on_event, explain_end=self._explain_end
        )
        self._watch = asyncio.create_task(self._watch_end(), name=f"{self.spec.name} watch")
        spec = self.spec
        await self._caller.call(
            "start",
            spec.kind,
            spec.factory,
            dict(spec.settings),
            [os.path.abspath(entry) for entry in sys.path],
            spec.num_threads,
            heartbeat_s,
            deadline_s=deadline_s,
        )

    async def stop(self, *, deadline_s: float) -> None:
        """Ask, then SIGTERM, then SIGKILL, each with its deadline. Raises RoleError, when all is over, if the
        role was asked and could not close."""
        if self._process is None:
            return
        self._stopping = True
        failed_to_close = await self._ask(deadline_s) and self._process.returncode != 0
        if self._process.returncode is None:
            _log.warning("%s did not end within %g s; it is terminated", self.spec.name, deadline_s)
            self._signal(signal.SIGTERM)
            await self._exited_within(min(deadline_s, _SIGNAL_DEADLINE_S))
        await self.kill()
        if failed_to_close:
            raise self._obituary()

    async def kill(self) -> None:
        """End the role, and whatever it left behind in its group, without asking."""
        if self._process is None:
            return
        self._stopping = True
        self._signal(signal.SIGKILL)
        if not await self._exited_within(_SIGNAL_DEADLINE_S):
            raise DeadlineError(
                f"{self.spec.name} (process {self.pid}) survived SIGKILL; the system must end it"
            )
        if self._caller is not None and self._watch is not None:
            await self._caller.close()
            await self._watch

    async def _ask(self, deadline_s: float) -> bool:
        """True when the role ended because it was asked to."""
        if self._caller is None or self.failure.done():
            return False
        try:
            await self._caller.call("exit", deadline_s=deadline_s)
        except (RoleError, DeadlineError):
            return False  # dead or hanging: the signals that follow end it
        return await self._exited_within(deadline_s)

    async def _launch(self, listener: Listener) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log_file:
            self._log_start = log_file.tell()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace.launch.child"),
                *("--socket", listener.address, "--role", self.spec.name),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
                env=self._environment(listener.token),
            )

    def _environment(self, token: str) -> dict[str, str]:
        threads = str(self.spec.num_threads)
        env = {
            **torch_defaults(version("torch")),
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            **self.spec.env,
            TOKEN_VARIABLE: token,
        }
        package_root = Path(headrace.__file__).parents[1]
        # Only for a source tree: site-packages placed before the standard library would shadow it.
        if package_root.name not in ("site-packages", "dist-packages"):
            inherited = env.get("PYTHONPATH")
            env["PYTHONPATH"] = os.pathsep.join([str(package_root), *([inherited] if inherited else [])])
        return env

    def _on_event(self, name: str, value: Any) -> None:
        if name == "heartbeat":
            self.heartbeat = Heartbeat(value, time.monotonic())
        elif name == "unhandled":
            self._unhandled = value

    async def _explain_end(self) -> str:
        if self._stopping:
            return f"{self.spec.name} was closed"
        if not await self._exited_within(_LAST_WORDS_DEADLINE_S):
            self._signal(signal.SIGKILL)
            await self._exited_within(_SIGNAL_DEADLINE_S)
        return str(self._obituary())

    async def _watch_end(self) -> None:
        await self.caller.wait_end()
        if not self._stopping:
            self.failure.set_result(self._obituary())

    def _obituary(self) -> RoleError:
        error = RoleError(f"{self.spec.name} died ({self._cause()}){self._log_tail()}")
        if self._unhandled:
            error.__cause__ = RemoteTraceback(f"\n\n{self.spec.name}:\n{self._unhandled}")
        return error

    def _cause(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return "its connection ended"
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def _log_tail(self) -> str:
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - _LOG_TAIL_BYTES))
                tail = file.read().decode(errors="replace").strip()
        except OSError as error:
            return f"; its log cannot be read ({error})"
        return f"; the end of {self.log}:\n{tail}" if tail else f"; its log {self.log} is empty"

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # the group is gone already (macOS says so with EPERM)

    async def _wait_exit(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def _exited_within(self, deadline_s: float) -> bool:
        try:
            async with asyncio.timeout(deadline_s):
                await self._wait_exit()
        except TimeoutError:
            return False
        return True
