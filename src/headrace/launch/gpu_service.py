"""NVIDIA's Multi-Process Service for the roles of one run, so that their kernels run side by side on one GPU.

In: a directory of the run's own. Out: what roles must find in their environment to be served. Without a service
processes take turns of a few milliseconds and compute the same, so whatever keeps one from being used costs time and
nothing else: there is no GPU, it is not installed, it does not start, or a process that tries it cannot compute. One
that is there already is used and left alone; whoever names one by ``CUDA_MPS_PIPE_DIRECTORY``, there or not, decides.

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
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_USUAL_PIPES = Path("/tmp/nvidia-mps")
_DRIVER = Path("/dev/nvidiactl")
_START_S, _ANSWER_S, _TRY_S, _END_S = 20.0, 20.0, 60.0, 10.0
_LOOK_S = 0.02
_TRY = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
found = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
sys.exit(bool(found or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)))
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

    async def stop(self) -> None:
        """When those it serves have ended. It may be called again."""
        if self.process is None or self.process.returncode is not None:
            return
        await _asked("quit", self.environment)
        try:
            await asyncio.wait_for(self.process.wait(), _END_S)
        except TimeoutError:
            await _kill(self.process)


def is_installed() -> bool:
    return shutil.which(_CONTROL) is not None


async def start_gpu_service(directory: Path, *, log: Path, guardian: Guardian) -> GpuService | None:
    """``directory`` must not exist yet, and have a short name, since sockets lie there. None: roles take turns."""
    if not _DRIVER.exists() or not is_installed():
        return None
    if _PIPES in os.environ or (_USUAL_PIPES / "control").exists():
        is_there = await _asked("get_server_list", {}) is not None
        if is_there or _PIPES in os.environ:
            return GpuService({}) if is_there else None
    directory.mkdir()
    environment = {_PIPES: str(directory), _LOGS: str(directory)}
    try:
        process = await _launch(environment, log)
    except OSError as error:
        _warn(f"cannot be started ({error})", log)
        return None
    guardian.watch(process.pid)
    service = GpuService(environment, process)
    try:
        trouble = await _trouble(process, environment, directory)
    except BaseException:
        await _kill(process)
        raise
    if not trouble:
        return service
    _warn(trouble, log)
    await service.stop()
    return None


def _warn(trouble: str, log: Path) -> None:
    _log.warning(
        "engine and trainer take turns on the GPU, since NVIDIA's Multi-Process Service %s; see %s, or set %s to a "
        "folder of your own service's",
        trouble,
        log,
        _PIPES,
    )


async def _launch(environment: dict[str, str], log: Path) -> asyncio.subprocess.Process:
    # A service counts the GPUs that it sees anew, and processes would choose among those by the old numbers.
    own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    with log.open("ab") as log_file:
        return await asyncio.create_subprocess_exec(
            *(_CONTROL, "-f"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
            env=own | environment,
        )


async def _trouble(
    process: asyncio.subprocess.Process, environment: Mapping[str, str], directory: Path
) -> str:
    """Why it cannot be used; empty: it can."""
    due = asyncio.get_running_loop().time() + _START_S
    while not (directory / "control").exists():
        if process.returncode is not None:
            return f"ended with {process.returncode}"
        if asyncio.get_running_loop().time() > due:
            return f"was not there {_START_S:g} s after its start"
        await asyncio.sleep(_LOOK_S)
    tried = await _ran(TRY, environment, deadline_s=_TRY_S)
    if tried is None or tried[0]:
        return "let no process compute"
    # A process that finds nobody computes all the same. The first that finds it has it start its server.
    return "" if await _asked("get_server_list", environment) else "was not found by a process"


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
            stderr=asyncio.subprocess.DEVNULL,
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
    """It and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        raise DeadlineError(f"process {process.pid} survived SIGKILL; the system must end it") from None
