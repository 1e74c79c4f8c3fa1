"""NVIDIA's Multi-Process Service for as long as a measurement takes, so that kernels of several processes run side by
side on one GPU.

In: a file for what it says. Out: whether processes that are started meanwhile are served. Without a service they take
turns of a few milliseconds and compute the same, so whatever keeps one from being used is told and costs time, nothing
else. One that is there already is used and left alone. Whoever sets a ``CUDA_MPS_`` variable decides: then none is
started. What was started ends with the measurement: it is asked to, then killed, with the servers it started; a
guardian does that where this process is killed itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
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
_START_S, _ANSWER_S, _TRY_S, _END_S = 30.0, 10.0, 60.0, 10.0
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


class _Unusable(Exception):
    """Why there is no service."""


@contextmanager
def side_by_side(log: Path, *, progress: Callable[[str], None] = lambda line: None) -> Iterator[bool]:
    """For the first GPU that this process sees. False: processes take turns; why is told, if there is a GPU."""
    if not os.path.exists(_DRIVER) or os.environ.get(_VISIBLE) == "":
        yield False
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(_serving(log))
            is_served = True
        except (_Unusable, OSError) as reason:
            progress(f"processes take turns on the GPU: {reason}; see {log}")
            is_served = False
        yield is_served


def _serving(log: Path) -> AbstractContextManager[object]:
    is_decided = any(name.startswith(_VARIABLES) for name in os.environ)
    if (is_decided or os.path.exists(f"{_USUAL_PIPES}/control")) and _try({}, log):
        return nullcontext()
    if is_decided:
        raise _Unusable(
            f"a {_VARIABLES} variable is set, and no process could compute under the service it means"
        )
    if shutil.which(_CONTROL) is None:
        raise _Unusable(
            f"NVIDIA's Multi-Process Service ({_CONTROL}), which comes with the driver, is not here"
        )
    return _own(log)


@contextmanager
def _own(log: Path) -> Iterator[None]:
    told, called = _first_gpu()
    # Sockets lie there, whose names must be short.
    with tempfile.TemporaryDirectory(prefix="headrace-mps-") as directory, log.open("ab") as file:
        environment = {_PIPES: directory, _LOGS: directory, _VISIBLE: called}
        guardian = Guardian(log)
        guardian.remove(Path(directory))
        begun: set[int] = set()

        def watch(pid: int) -> None:
            begun.add(pid)
            guardian.watch(pid)

        service: subprocess.Popen[bytes] | None = None
        try:
            service = subprocess.Popen(
                [_CONTROL, "-f"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **environment, _VISIBLE: told},
            )
            watch(service.pid)
            _wait_until_it_answers(service, environment)
            if not _try(environment, log, watch):
                raise _Unusable("no process could compute under NVIDIA's Multi-Process Service")
            with _environment(environment):
                yield
        finally:
            if service is not None:
                _end(service, environment, begun)
            guardian.dismiss()


def _first_gpu() -> tuple[str, str]:
    """How a service is told of the first GPU alone, and what processes then call it: it counts those it sees anew, and
    it takes memory on each of them."""
    first = os.environ.get(_VISIBLE, "0").split(",")[0].strip()
    return first, "0" if first.isdigit() else first


def _wait_until_it_answers(service: subprocess.Popen[bytes], environment: Mapping[str, str]) -> None:
    deadline = time.monotonic() + _START_S
    while _asked("get_server_list", environment) is None:
        if service.poll() is not None:
            raise _Unusable(f"NVIDIA's Multi-Process Service ended with {service.returncode}")
        if time.monotonic() > deadline:
            raise _Unusable(f"NVIDIA's Multi-Process Service did not answer {_START_S:g} s after its start")
        time.sleep(_LOOK_S)


def _try(environment: Mapping[str, str], log: Path, watch: Callable[[int], None] = lambda pid: None) -> bool:
    """Whether a process that tries it computes, and under the service: one that finds none computes all the same. The
    first has the service start a server. ``watch`` is told of both as soon as they are there."""
    with log.open("ab") as file:
        trial = subprocess.Popen(
            TRY,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    try:
        watch(trial.pid)
        deadline = time.monotonic() + _TRY_S
        is_served = False
        while True:
            has_ended = trial.poll() is not None
            for server in _servers(environment):
                is_served = True
                watch(server)
            if has_ended or time.monotonic() > deadline:
                return trial.returncode == 0 and is_served
            time.sleep(_LOOK_S)
    finally:
        _kill(trial)


def _servers(environment: Mapping[str, str]) -> list[int]:
    return [int(word) for word in (_asked("get_server_list", environment) or "").split() if word.isdigit()]


def _asked(question: str, environment: Mapping[str, str]) -> str | None:
    """What the service answers; None: there is none, or it does not answer."""
    try:
        answer = subprocess.run(
            [_CONTROL],
            input=f"{question}\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            env={**os.environ, **environment},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if answer.returncode else answer.stdout


@contextmanager
def _environment(told: Mapping[str, str]) -> Iterator[None]:
    """What processes that are started meanwhile find in theirs."""
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _end(service: subprocess.Popen[bytes], environment: Mapping[str, str], begun: set[int]) -> None:
    """``begun``: processes that may be servers of it, though it should not name them any more."""
    begun.update(_servers(environment))
    if _asked("quit", environment) is not None:
        with suppress(subprocess.TimeoutExpired):
            service.wait(_END_S)
    _kill(service)
    for pid in begun:
        _kill_server(pid)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """It, if it lives, and what is left of its group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"process {process.pid} survived SIGKILL; the system must end it") from None


def _kill_server(pid: int) -> None:
    """A server may lead a group of its own; its number may be another process's by now."""
    with suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text().strip() == _NAME:
            os.kill(pid, signal.SIGKILL)
