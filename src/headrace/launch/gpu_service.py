"""NVIDIA's Multi-Process Service for the roles of one run, so that their kernels run side by side on one GPU.

In: a directory of the run's own. Out: what roles must find in their environment to be served. Without a service
processes take turns of a few milliseconds and compute the same, so whatever keeps one from being used costs time and
nothing else: there is no GPU, it is not installed, it does not start, or a process that tries it cannot compute. One
that is there already is used and left alone. Whoever sets a ``CUDA_MPS_`` variable decides: then none is started.

    how the run ends       who ends its service
    stop()                 this file: ask, then SIGKILL
    controller killed      the guardian
    both killed            nobody: it stays, without work
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import DeadlineError
from headrace.launch.guardian import Guardian

_CONTROL = "nvidia-cuda-mps-control"
_NAME = "nvidia-cuda-mps"
"""Of its processes, as far as the system keeps it."""
_VARIABLES, _VISIBLE = "CUDA_MPS_", "CUDA_VISIBLE_DEVICES"
_PIPES, _LOGS = f"{_VARIABLES}PIPE_DIRECTORY", f"{_VARIABLES}LOG_DIRECTORY"
_USUAL_PIPES = "/tmp/nvidia-mps"
_DRIVER = "/dev/nvidiactl"
_START_S, _ANSWER_S, _TRY_S, _END_S = 90.0, 10.0, 60.0, 10.0
_LOOK_S = 0.05
_TRY = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
found = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
found = found or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
sys.exit(f"CUDA error {found}" if found else 0)
"""
TRY = (sys.executable, "-I", "-S", "-c", _TRY)
"""Of a process that begins to compute on the first GPU, without what takes long to import."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuService:
    """One that is there, and that a process has computed under."""

    environment: Mapping[str, str]
    """Of processes that it is to serve, besides what they inherit."""
    process: asyncio.subprocess.Process | None = None
    """None: it is not the run's own."""
    servers: tuple[int, ...] = ()
    """Processes that it has started to serve others."""

    async def stop(self) -> None:
        """When those it serves have ended. It may be called again."""
        if self.process is None:
            return
        try:
            if self.process.returncode is None:
                await _asked("quit", self.environment)
                await asyncio.wait_for(self.process.wait(), _END_S)
        except TimeoutError:
            _log.warning("NVIDIA's Multi-Process Service did not end within %g s; it is killed", _END_S)
        finally:
            for server in self.servers:
                _kill_server(server)
            await _kill(self.process)


async def start_gpu_service(directory: Path, *, log: Path, guardian: Guardian) -> GpuService | None:
    """For the first GPU that this process sees. ``directory`` must not exist yet, and have a short name, since sockets
    lie there. None: roles take turns."""
    if not os.path.exists(_DRIVER) or shutil.which(_CONTROL) is None or os.environ.get(_VISIBLE) == "":
        return None
    is_decided = any(name.startswith(_VARIABLES) for name in os.environ)
    try:
        if (is_decided or os.path.exists(f"{_USUAL_PIPES}/control")) and await _servers_tried({}, log):
            return GpuService({})
        return None if is_decided else await _own(directory, log, guardian)
    except (OSError, DeadlineError, _Unusable) as error:
        _log.warning(
            "engine and trainer take turns on the GPU, since NVIDIA's Multi-Process Service cannot be used: %s; "
            "see %s",
            error,
            log,
        )
        return None


class _Unusable(Exception):
    """Why a service was given up."""


async def _own(directory: Path, log: Path, guardian: Guardian) -> GpuService:
    directory.mkdir()
    told, called = _first_gpu()
    environment = {_PIPES: str(directory), _LOGS: str(directory), _VISIBLE: called}
    with log.open("ab") as log_file:
        process = await asyncio.create_subprocess_exec(
            *(_CONTROL, "-f"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
            env={**os.environ, **environment, _VISIBLE: told},
        )
    guardian.watch(process.pid)
    service = GpuService(environment, process)
    try:
        async with asyncio.timeout(_START_S):
            await _answers(process, environment)
            servers = await _servers_tried(environment, log)
    except TimeoutError:
        await service.stop()
        raise _Unusable(f"it was not ready {_START_S:g} s after its start") from None
    except BaseException:
        await _kill(process)
        raise
    if not servers:
        await service.stop()
        raise _Unusable("no process could compute under it")
    for server in servers:
        guardian.watch(server)
    return GpuService(environment, process, servers)


def _first_gpu() -> tuple[str, str]:
    """How a service is told of the first GPU alone, and what processes then call it: it counts those it sees anew, and
    it takes memory on each of them."""
    first = os.environ.get(_VISIBLE, "0").split(",")[0].strip()
    return first, "0" if first.isdigit() else first


async def _answers(process: asyncio.subprocess.Process, environment: Mapping[str, str]) -> None:
    while await _asked("get_server_list", environment) is None:
        if process.returncode is not None:
            raise _Unusable(f"it ended with {process.returncode}")
        await asyncio.sleep(_LOOK_S)


async def _servers_tried(environment: Mapping[str, str], log: Path) -> tuple[int, ...]:
    """Those of the service that a process has just computed under; none: it could not, or not under a service. A
    process that finds no service computes all the same, and the first that finds one has it start its server."""
    tried = await _ran(TRY, environment, deadline_s=_TRY_S)
    if tried is None or tried[0]:
        with log.open("a") as file:
            file.write(f"a process that was to compute: {'no answer' if tried is None else tried[1]}\n")
        return ()
    found = await _asked("get_server_list", environment) or ""
    return tuple(int(word) for word in found.split() if word.isdigit())


async def _asked(question: str, environment: Mapping[str, str]) -> str | None:
    """What the service answers; None: there is none, or it does not answer."""
    answer = await _ran([_CONTROL], environment, said=f"{question}\n", deadline_s=_ANSWER_S)
    return None if answer is None or answer[0] else answer[1]


async def _ran(
    command: Sequence[str], environment: Mapping[str, str], *, said: str = "", deadline_s: float
) -> tuple[int, str] | None:
    """Exit code and output of a command; None: it could not be started, or had to be ended."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    except OSError:
        return None
    try:
        output, _ = await asyncio.wait_for(process.communicate(said.encode()), deadline_s)
    except TimeoutError:
        await _kill(process)
        return None
    except BaseException:
        await _kill(process)
        raise
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace").strip()


async def _kill(process: asyncio.subprocess.Process) -> None:
    """It, if it lives, and what is left of its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        raise DeadlineError(f"process {process.pid} survived SIGKILL; the system must end it") from None


def _kill_server(pid: int) -> None:
    """A server may lead a group of its own; its number may be another process's by now."""
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() == _NAME:
            os.kill(pid, signal.SIGKILL)
    except OSError:
        return
