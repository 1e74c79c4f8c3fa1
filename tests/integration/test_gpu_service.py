"""The service that lets kernels of several processes run side by side, with a stand-in for NVIDIA's program."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.bench import gpu_service
from headrace.bench.gpu_service import side_by_side
from headrace.weights.segment_directory import process_start

DEADLINE_S = 60.0
CONTROL = """#!/bin/sh
cd "${CUDA_MPS_PIPE_DIRECTORY:-$USUAL_PIPES}" || exit 1
if [ "$1" = -f ]; then
    echo "sees ${CUDA_VISIBLE_DEVICES:-all}"
    echo $$ > pid
    cp pid "$STATE/service"
    touch control
    while [ ! -f client ]; do sleep 0.02; done
    setsid "$SERVER" 600 &
    echo $! > listed
    cp listed "$STATE/server"
    mv listed servers
    exec sleep 600
fi
read question
echo "$question" >> "$STATE/questions"
[ -f pid ] && kill -0 "$(cat pid)" || exit 1
case "$question" in
    get_server_list) [ ! -f servers ] || cat servers ;;
    quit) [ -f "$STATE/deaf" ] || kill $(cat servers pid) ;;
esac
"""
"""Starts a server, in a session of its own, for the first client that comes."""
PIPES = "${CUDA_MPS_PIPE_DIRECTORY:-$USUAL_PIPES}"
COMES = f'touch "{PIPES}/client"; '
COMPUTES = ("sh", "-c", COMES + f'cd "{PIPES}"; until [ -f servers ]; do sleep 0.02; done')
HANGS = ("sh", "-c", 'echo $$ > "$STATE/trial"; ' + COMES + "exec sleep 600")


@pytest.fixture
def state(tmp_path, monkeypatch) -> Iterator[Path]:
    """What the stand-ins say of themselves, on a machine that has a GPU and no service yet. Nothing may be left."""
    programs, state, driver = tmp_path / "bin", tmp_path / "state", tmp_path / "driver"
    for directory in (programs, state, tmp_path / "usual"):
        directory.mkdir()
    driver.touch()
    control, server = programs / "nvidia-cuda-mps-control", programs / "nvidia-cuda-mps-server"
    control.write_text(CONTROL)
    control.chmod(0o755)
    shutil.copy(shutil.which("sleep") or "", server)
    for name in [name for name in os.environ if name.startswith("CUDA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("USUAL_PIPES", str(tmp_path / "usual"))
    monkeypatch.setenv("SERVER", str(server))
    monkeypatch.setenv("STATE", str(state))
    monkeypatch.setattr(gpu_service, "_DRIVER", str(driver))
    monkeypatch.setattr(gpu_service, "_USUAL_PIPES", str(tmp_path / "usual"))
    monkeypatch.setattr(gpu_service, "TRY", COMPUTES)
    yield state
    left = [pid for pid in pids(state) if process_start(pid) is not None]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes outlived the service"


def pids(state: Path) -> list[int]:
    """Of all that the stand-ins were: the service, its server, the process that tries it."""
    return [
        int((state / name).read_text()) for name in ("service", "server", "trial") if (state / name).exists()
    ]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s for {what}"
        time.sleep(0.01)


@contextmanager
def anothers(pipes: Path, state: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A service that somebody else has started."""
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    other = subprocess.Popen(["nvidia-cuda-mps-control", "-f"], env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_until((pipes / "control").exists, "another's service")
        yield other
    finally:
        other.kill()
        other.wait(DEADLINE_S)
        for pid in pids(state):
            if process_start(pid) is not None:
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: all(process_start(pid) is None for pid in pids(state)), "another's server to end")


@pytest.mark.parametrize(
    ("visible", "told", "called"),
    [(None, "0", "0"), ("2,3", "2", "0"), ("GPU-8932f937,GPU-1", "GPU-8932f937", "GPU-8932f937")],
)
def test_processes_find_it_and_it_ends_behind_them(tmp_path, state, monkeypatch, visible, told, called):
    """It sees the GPU that is used and no other, and counts it anew."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    before = dict(os.environ)
    with side_by_side(tmp_path / "log") as is_served:
        assert is_served and len(pids(state)) == 2
        assert os.environ["CUDA_VISIBLE_DEVICES"] == called
        pipes = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        assert (pipes / "control").exists() and len(str(pipes)) < 60
    assert dict(os.environ) == before and not pipes.exists()
    assert all(process_start(pid) is None for pid in pids(state))
    assert (state / "questions").read_text().endswith("quit\n")
    assert f"sees {told}\n" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("ends_first", [False, True])
def test_one_that_does_not_end_when_asked_is_killed_with_its_server(tmp_path, state, monkeypatch, ends_first):
    monkeypatch.setattr(gpu_service, "_END_S", 0.1)
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        with side_by_side(tmp_path / "log") as is_served:
            assert is_served
            (state / "deaf").touch()
            pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
            # Its number may be another process's by now.
            Path(pipes, "servers").write_text(f"{pids(state)[1]} {stranger.pid}\n")
            if ends_first:
                os.kill(pids(state)[0], signal.SIGKILL)
        assert all(process_start(pid) is None for pid in pids(state)) and stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(DEADLINE_S)


def test_it_ends_when_what_it_serves_fails(tmp_path, state):
    with pytest.raises(ZeroDivisionError), side_by_side(tmp_path / "log"):
        _ = 1 / 0
    assert len(pids(state)) == 2 and all(process_start(pid) is None for pid in pids(state))


@pytest.mark.parametrize(
    ("attempt", "program", "said"),
    [
        (("sh", "-c", COMES + "echo CUDA error 805; exit 1"), CONTROL, "no process could compute"),
        (("no-such-program",), CONTROL, "no-such-program"),
        (("sh", "-c", "exit 0"), CONTROL, "no process could compute"),
        (COMPUTES, "#!/bin/sh\nexit 3\n", "ended with 3"),
        (COMPUTES, '#!/bin/sh\n[ -n "$1" ] || exit 1; exec sleep 600\n', "did not answer 1 s"),
        (COMPUTES, "", "nvidia-cuda-mps-control"),
        (HANGS, CONTROL, "no process could compute"),
    ],
)
def test_processes_take_turns_where_it_cannot_be_used(tmp_path, state, monkeypatch, attempt, program, said):
    (tmp_path / "bin" / "nvidia-cuda-mps-control").write_text(program)
    monkeypatch.setattr(gpu_service, "TRY", attempt)
    monkeypatch.setattr(gpu_service, "_START_S", 1.0 if "did not answer" in said else DEADLINE_S)
    monkeypatch.setattr(gpu_service, "_TRY_S", 1.0 if attempt is HANGS else DEADLINE_S)
    told: list[str] = []
    with side_by_side(tmp_path / "log", progress=told.append) as is_served:
        assert not is_served and not any(name.startswith("CUDA_") for name in os.environ)
    assert len(told) == 1 and said in told[0] and "take turns" in told[0]
    assert all(process_start(pid) is None for pid in pids(state))
    assert "805" not in attempt[-1] or "CUDA error 805" in (tmp_path / "log").read_text()


def test_a_start_that_is_given_up_leaves_nothing(tmp_path, state, monkeypatch):
    monkeypatch.setattr(gpu_service, "TRY", HANGS)
    tried = threading.Event()

    def interrupt() -> None:
        wait_until(lambda: len(pids(state)) == 3, "a server")
        tried.set()
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt), side_by_side(tmp_path / "log"):
        pass
    interrupter.join(DEADLINE_S)
    assert tried.is_set() and all(process_start(pid) is None for pid in pids(state))


@pytest.mark.parametrize("hangs", [False, True])
def test_the_guardian_ends_it_when_this_process_is_killed(tmp_path, state, hangs):
    """Also in the midst of its start, once the server is known."""
    program = (
        "import sys, time; from pathlib import Path; from headrace.bench import gpu_service\n"
        "from headrace.launch.guardian import Guardian\n"
        "class Telling(Guardian):\n"
        "    def watch(self, pid):\n"
        "        super().watch(pid); print(pid, flush=True)\n"
        f"gpu_service.Guardian, gpu_service._DRIVER = Telling, {str(tmp_path / 'driver')!r}\n"
        f"gpu_service._USUAL_PIPES = {str(tmp_path / 'usual')!r}\n"
        f"gpu_service.TRY = {HANGS if hangs else COMPUTES!r}\n"
        f"with gpu_service.side_by_side(Path({str(tmp_path / 'log')!r})): time.sleep(600)\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert killed.stdout is not None
    try:
        with killed.stdout:
            watched = {int(killed.stdout.readline()) for _ in range(3)}
        assert watched >= {int((state / name).read_text()) for name in ("service", "server")}
    finally:
        killed.kill()
        killed.wait(DEADLINE_S)
    wait_until(lambda: all(process_start(pid) is None for pid in watched), "the guardian to end the service")


@pytest.mark.parametrize("named", [False, True])
def test_one_that_is_there_is_used_and_left_alone(tmp_path, state, monkeypatch, named):
    pipes = tmp_path / "usual"
    if named:
        pipes = tmp_path / "named"
        pipes.mkdir()
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
    before = dict(os.environ)
    with anothers(pipes, state) as other:
        with side_by_side(tmp_path / "log") as is_served:
            assert is_served and dict(os.environ) == before
        assert all(process_start(pid) is not None for pid in pids(state)) and other.poll() is None


def test_what_a_service_has_left_behind_is_none(tmp_path, state):
    (tmp_path / "usual" / "control").touch()
    (tmp_path / "usual" / "servers").touch()
    with side_by_side(tmp_path / "log") as is_served:
        assert is_served and "CUDA_MPS_PIPE_DIRECTORY" in os.environ


@pytest.mark.parametrize("variable", ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
def test_whoever_sets_its_variables_decides(tmp_path, state, monkeypatch, variable):
    monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(gpu_service, "TRY", ("sh", "-c", "exit 0"))
    told: list[str] = []
    with side_by_side(tmp_path / "log", progress=told.append) as is_served:
        assert not is_served and not pids(state)
    assert len(told) == 1 and "CUDA_MPS_ variable is set" in told[0]


@pytest.mark.parametrize("lacking", ["driver", "program", "visible"])
def test_without_a_gpu_or_the_program_nothing_is_tried(tmp_path, state, monkeypatch, lacking):
    if lacking == "visible":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    else:
        (tmp_path / {"driver": "driver", "program": "bin/nvidia-cuda-mps-control"}[lacking]).unlink()
    told: list[str] = []
    with side_by_side(tmp_path / "log", progress=told.append) as is_served:
        assert not is_served and not (state / "questions").exists() and not pids(state)
    assert len(told) == (lacking == "program")
