"""The service that lets kernels of several processes run side by side, with a stand-in for NVIDIA's program."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.launch import gpu_service
from headrace.launch.guardian import Guardian
from headrace.launch.local import LocalLauncher, RoleSpec
from headrace.weights.segment_directory import create_segment_directory, process_start

DEADLINE_S = 60.0
CONTROL = """#!/bin/sh
cd "${CUDA_MPS_PIPE_DIRECTORY:-$USUAL_PIPES}" || exit 1
if [ "$1" = -f ]; then
    echo "sees ${CUDA_VISIBLE_DEVICES:-all}"
    echo $$ > pid
    touch control
    exec sleep 600
fi
read question
echo "$question" >> "$QUESTIONS"
[ -f pid ] && kill -0 "$(cat pid)" || exit 1
case "$question" in
    get_server_list) [ ! -f servers ] || cat servers ;;
    quit) cp "$LOGS/engine-0.log" "$LOGS/at-quit" 2> /dev/null; [ -f deaf ] || kill "$(cat pid)" ;;
esac
"""
FIND = 'echo SERVERS > "${CUDA_MPS_PIPE_DIRECTORY:-$USUAL_PIPES}/servers"'
COMPUTES = ("sh", "-c", FIND.replace("SERVERS", "$$"))
"""What it names has ended."""


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Path:
    """Where the program lies, on a machine that has a GPU and no service yet."""
    programs, driver = tmp_path / "bin", tmp_path / "driver"
    programs.mkdir(), driver.touch(), (tmp_path / "usual").mkdir()
    control = programs / "nvidia-cuda-mps-control"
    control.write_text(CONTROL)
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("USUAL_PIPES", str(tmp_path / "usual"))
    monkeypatch.setenv("QUESTIONS", str(tmp_path / "questions"))
    monkeypatch.setenv("LOGS", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("CUDA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(gpu_service, "_DRIVER", str(driver))
    monkeypatch.setattr(gpu_service, "_USUAL_PIPES", str(tmp_path / "usual"))
    monkeypatch.setattr(gpu_service, "TRY", COMPUTES)
    return control


def run_with_guardian(tmp_path: Path, test: Callable[[Guardian], object]) -> None:
    async def main() -> None:
        guardian = Guardian(tmp_path / "guardian.log")
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(guardian)
        finally:
            guardian.dismiss()

    asyncio.run(main())


async def started(tmp_path: Path, guardian: Guardian) -> gpu_service.GpuService | None:
    log = tmp_path / "service.log"
    return await gpu_service.start_gpu_service(tmp_path / "gpu", log=log, guardian=guardian)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s for {what}"
        time.sleep(0.01)


@contextmanager
def anothers(control: Path, pipes: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A service that somebody else has started."""
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    other = subprocess.Popen([str(control), "-f"], env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_until((pipes / "control").exists, "another's service")
        yield other
    finally:
        other.kill()
        other.wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("visible", "told", "called"),
    [(None, "0", "0"), ("2,3", "2", "0"), ("GPU-8932f937,GPU-1", "GPU-8932f937", "GPU-8932f937")],
)
def test_a_service_of_the_runs_own_is_there_until_it_is_stopped(
    tmp_path, installed, monkeypatch, visible, told, called
):
    """It sees the GPU that is used and no other, and counts it anew."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    async def test(guardian: Guardian) -> None:
        service = await started(tmp_path, guardian)
        assert service is not None and service.process is not None
        assert list(service.servers) == [int((tmp_path / "gpu" / "servers").read_text())]
        assert service.environment["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "gpu")
        assert service.environment["CUDA_VISIBLE_DEVICES"] == called
        assert process_start(service.process.pid) is not None
        await service.stop()
        assert service.process.returncode == -signal.SIGTERM, "it ended because it was asked"
        await service.stop()

    run_with_guardian(tmp_path, test)
    assert f"sees {told}\n" in (tmp_path / "service.log").read_text()


def test_a_service_that_does_not_end_when_asked_is_killed(tmp_path, installed, monkeypatch, caplog):
    monkeypatch.setattr(gpu_service, "_END_S", 0.1)

    async def test(guardian: Guardian) -> None:
        service = await started(tmp_path, guardian)
        assert service is not None and service.process is not None
        (tmp_path / "gpu" / "deaf").touch()
        await service.stop()
        assert service.process.returncode == -signal.SIGKILL

    run_with_guardian(tmp_path, test)
    assert "it is killed" in caplog.text


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_server_that_outlives_its_service_is_killed_and_nobody_else(
    tmp_path, installed, monkeypatch, ends_first
):
    server_program = tmp_path / "nvidia-cuda-mps-server"
    shutil.copy(shutil.which("sleep"), server_program)
    server, stranger = (
        subprocess.Popen([program, "600"], start_new_session=True) for program in (server_program, "sleep")
    )
    pids = f"{server.pid} {stranger.pid}"
    monkeypatch.setattr(gpu_service, "TRY", ("sh", "-c", FIND.replace("SERVERS", pids)))

    async def test(guardian: Guardian) -> None:
        service = await started(tmp_path, guardian)
        assert service is not None and service.process is not None
        if ends_first:
            service.process.kill()
            await service.process.wait()
        await service.stop()
        assert server.wait(DEADLINE_S) == -signal.SIGKILL and stranger.poll() is None

    try:
        run_with_guardian(tmp_path, test)
    finally:
        for process in (server, stranger):
            process.kill()
            process.wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("attempt", "program", "said"),
    [
        (("sh", "-c", "echo CUDA error 805; exit 1"), CONTROL, "no process could compute"),
        (("no-such-program",), CONTROL, "no process could compute"),
        (("sh", "-c", "exit 0"), CONTROL, "no process could compute"),
        (COMPUTES, "#!/bin/sh\nexit 3\n", "it ended with 3"),
        (COMPUTES, '#!/bin/sh\n[ -n "$1" ] || exit 1; exec sleep 600\n', "it was not ready 1 s"),
        (COMPUTES, "", "service.log"),
    ],
)
def test_roles_take_turns_where_it_cannot_be_used(
    tmp_path, installed, monkeypatch, caplog, attempt, program, said
):
    installed.write_text(program)
    monkeypatch.setattr(gpu_service, "TRY", attempt)
    monkeypatch.setattr(gpu_service, "_START_S", 1.0 if "not ready" in said else DEADLINE_S)

    async def test(guardian: Guardian) -> None:
        assert await started(tmp_path, guardian) is None

    run_with_guardian(tmp_path, test)
    assert said in caplog.text and "take turns" in caplog.text
    log = tmp_path / "service.log"
    assert holders_of(log) == []
    assert "805" not in attempt[-1] or "CUDA error 805" in log.read_text()


def test_a_process_that_hangs_when_it_is_to_compute_is_ended(tmp_path, installed, monkeypatch):
    monkeypatch.setattr(gpu_service, "_TRY_S", 0.5)
    monkeypatch.setattr(gpu_service, "TRY", ("sh", "-c", f"echo $$ > {tmp_path}/hangs; exec sleep 600"))

    async def test(guardian: Guardian) -> None:
        assert await started(tmp_path, guardian) is None

    run_with_guardian(tmp_path, test)
    assert process_start(int((tmp_path / "hangs").read_text())) is None


def test_a_start_that_is_given_up_leaves_nothing(tmp_path, installed, monkeypatch):
    monkeypatch.setattr(gpu_service, "TRY", ("sh", "-c", f"echo $$ > {tmp_path}/tries; exec sleep 600"))

    async def test(guardian: Guardian) -> None:
        start = asyncio.create_task(started(tmp_path, guardian))
        while not (tmp_path / "tries").exists():
            await asyncio.sleep(0.01)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    run_with_guardian(tmp_path, test)
    assert holders_of(tmp_path / "service.log") == []
    assert process_start(int((tmp_path / "tries").read_text())) is None


@pytest.mark.parametrize("named", [False, True])
def test_one_that_is_there_is_used_and_left_alone(tmp_path, installed, monkeypatch, named):
    pipes = tmp_path / "usual"
    if named:
        pipes = tmp_path / "named"
        pipes.mkdir()
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))

    async def test(guardian: Guardian) -> None:
        service = await started(tmp_path, guardian)
        assert service is not None and service.process is None and not service.environment
        await service.stop()

    with anothers(installed, pipes) as other:
        run_with_guardian(tmp_path, test)
        assert other.poll() is None


def test_what_a_service_has_left_behind_is_none(tmp_path, installed):
    (tmp_path / "usual" / "control").touch()

    async def test(guardian: Guardian) -> None:
        service = await started(tmp_path, guardian)
        assert service is not None and service.process is not None
        await service.stop()

    run_with_guardian(tmp_path, test)


@pytest.mark.parametrize("variable", ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
def test_whoever_sets_its_variables_decides(tmp_path, installed, monkeypatch, variable):
    monkeypatch.setenv(variable, str(tmp_path / "none"))

    async def test(guardian: Guardian) -> None:
        assert await started(tmp_path, guardian) is None

    run_with_guardian(tmp_path, test)
    assert not (tmp_path / "gpu").exists()


@pytest.mark.parametrize("lacking", ["driver", "program", "visible"])
def test_without_a_gpu_or_the_program_nothing_is_tried(tmp_path, installed, monkeypatch, lacking):
    if lacking == "visible":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    else:
        (tmp_path / "driver" if lacking == "driver" else installed).unlink()

    async def test(guardian: Guardian) -> None:
        assert await started(tmp_path, guardian) is None

    run_with_guardian(tmp_path, test)
    assert not (tmp_path / "gpu").exists() and not (tmp_path / "questions").exists()


def engine(factory: str = "engine") -> RoleSpec:
    settings = {"name": "engine-0"}
    return RoleSpec(name="engine-0", kind="engine", factory=f"toy_roles:{factory}", settings=settings)


def test_roles_find_it_and_it_ends_behind_them(tmp_path, installed):
    directory = create_segment_directory()

    async def main() -> None:
        cluster = await LocalLauncher(
            [engine()], log_dir=tmp_path, directory=directory, start_deadline_s=DEADLINE_S, shares_gpu=True
        ).spawn()
        try:
            assert cluster.is_side_by_side
            pids = dict(cluster.pids)
            environment = Path(f"/proc/{pids['engine-0']}/environ").read_text().split("\0")
            assert f"CUDA_MPS_PIPE_DIRECTORY={directory / 'gpu'}" in environment
        finally:
            await cluster.close()
        assert [name for name, pid in pids.items() if process_start(pid) is not None] == []

    asyncio.run(main())
    assert not directory.exists()
    assert "engine-0 closed" in (tmp_path / "at-quit").read_text()


def test_a_role_that_fails_to_start_leaves_none(tmp_path, installed):
    directory = create_segment_directory()

    async def main() -> None:
        launcher = LocalLauncher(
            [engine("leaver")], log_dir=tmp_path, directory=directory, start_deadline_s=DEADLINE_S,
            shares_gpu=True,
        )  # fmt: skip
        with pytest.raises(Exception, match="engine-0 died"):
            await launcher.spawn()

    asyncio.run(main())
    assert (tmp_path / "gpu-service.log").exists() and holders_of(tmp_path / "gpu-service.log") == []
    assert not directory.exists()


def test_the_guardian_ends_it_when_the_controller_is_killed(tmp_path, installed):
    program = (
        "import asyncio, sys, time; from pathlib import Path; from headrace.launch import gpu_service\n"
        "from headrace.launch.guardian import Guardian\n"
        f"gpu_service._DRIVER, gpu_service.TRY = {str(tmp_path / 'driver')!r}, {COMPUTES!r}\n"
        f"where = Path({str(tmp_path)!r}); guardian = Guardian(where / 'guardian.log')\n"
        "start = gpu_service.start_gpu_service(where / 'gpu', log=where / 'service.log', guardian=guardian)\n"
        "print(asyncio.run(start).process.pid, flush=True); time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    controller = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout is not None
    with controller.stdout:
        pid = int(controller.stdout.readline())
    try:
        assert process_start(pid) is not None
        controller.kill()
        controller.wait(DEADLINE_S)
        wait_until(lambda: process_start(pid) is None, "the guardian to end the service")
    finally:
        if process_start(pid) is not None:
            os.kill(pid, signal.SIGKILL)


def holders_of(log: Path) -> list[int]:
    """Processes that hold the log open."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if Path(os.readlink(entry)) == log:
                found.append(int(entry.parts[2]))
        except OSError:
            continue
    return found
