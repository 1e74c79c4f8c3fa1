"""The service that lets kernels of several processes run side by side, with a stand-in for NVIDIA's program."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace import build
from headrace.config import from_dict
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
[ -f pid ] && kill -0 "$(cat pid)" || exit 1
case "$question" in
    get_server_list) [ ! -f servers ] || cat servers ;;
    quit) [ -f deaf ] || kill "$(cat pid)" ;;
esac
"""
COMPUTES = ("sh", "-c", "echo 4242 > $CUDA_MPS_PIPE_DIRECTORY/servers")


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
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(gpu_service, "_DRIVER", driver)
    monkeypatch.setattr(gpu_service, "_USUAL_PIPES", tmp_path / "usual")
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


def test_a_service_of_the_runs_own_is_there_until_it_is_stopped(tmp_path, installed, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")

    async def test(guardian: Guardian) -> None:
        service = await started(tmp_path, guardian)
        assert service is not None and service.process is not None
        assert service.environment["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "gpu")
        assert process_start(service.process.pid) is not None
        await service.stop()
        await service.stop()
        assert process_start(service.process.pid) is None

    run_with_guardian(tmp_path, test)
    # It counts all GPUs, so that the numbers by which roles choose among them stay what they are.
    assert "sees all" in (tmp_path / "service.log").read_text()


def test_a_service_that_does_not_end_when_asked_is_killed(tmp_path, installed, monkeypatch):
    monkeypatch.setattr(gpu_service, "_END_S", 0.1)

    async def test(guardian: Guardian) -> None:
        service = await started(tmp_path, guardian)
        assert service is not None and service.process is not None
        (tmp_path / "gpu" / "deaf").touch()
        await service.stop()
        assert service.process.returncode == -signal.SIGKILL

    run_with_guardian(tmp_path, test)


@pytest.mark.parametrize(
    ("attempt", "program", "said"),
    [
        (("sh", "-c", "exit 1"), CONTROL, "let no process compute"),
        (("no-such-program",), CONTROL, "let no process compute"),
        (("sh", "-c", "exit 0"), CONTROL, "was not found by a process"),
        (COMPUTES, "#!/bin/sh\nexit 3\n", "ended with 3"),
        (COMPUTES, "#!/bin/sh\nexec sleep 600\n", "was not there"),
        (COMPUTES, "", "cannot be started"),
    ],
)
def test_roles_take_turns_where_it_cannot_be_used(
    tmp_path, installed, monkeypatch, caplog, attempt, program, said
):
    installed.write_text(program)
    monkeypatch.setattr(gpu_service, "TRY", attempt)
    monkeypatch.setattr(
        gpu_service, "_START_S", 0.3 if "sleep 600" in program and program != CONTROL else 20.0
    )
    monkeypatch.setattr(gpu_service, "_ANSWER_S", 0.3)
    monkeypatch.setattr(gpu_service, "_END_S", 0.3)

    async def test(guardian: Guardian) -> None:
        assert await started(tmp_path, guardian) is None

    run_with_guardian(tmp_path, test)
    assert said in caplog.text and "take turns" in caplog.text
    assert holders_of(tmp_path / "service.log") == []


def test_one_that_is_there_is_used_and_left_alone(tmp_path, installed):
    def others(pipes: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
        other = subprocess.Popen([str(installed), "-f"], env=environment, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + DEADLINE_S
        while not (pipes / "control").exists():
            assert time.monotonic() < deadline, "waited for another's service"
            time.sleep(0.01)
        return other

    other = others(tmp_path / "usual")
    try:

        async def test(guardian: Guardian) -> None:
            service = await started(tmp_path, guardian)
            assert service is not None and service.process is None and not service.environment
            await service.stop()
            assert other.poll() is None

        run_with_guardian(tmp_path, test)
    finally:
        other.kill()
        other.wait(DEADLINE_S)


def test_whoever_names_a_service_decides(tmp_path, installed, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "none"))

    async def test(guardian: Guardian) -> None:
        assert await started(tmp_path, guardian) is None

    run_with_guardian(tmp_path, test)
    assert not (tmp_path / "gpu").exists()


@pytest.mark.parametrize("lacking", ["driver", "program"])
def test_without_a_gpu_or_the_program_nothing_is_tried(tmp_path, installed, lacking):
    (tmp_path / "driver" if lacking == "driver" else installed).unlink()

    async def test(guardian: Guardian) -> None:
        assert await started(tmp_path, guardian) is None

    run_with_guardian(tmp_path, test)
    assert not (tmp_path / "gpu").exists()


def test_roles_find_it_and_it_ends_with_them(tmp_path, installed):
    directory = create_segment_directory()
    role = RoleSpec(name="engine-0", kind="engine", factory="toy_roles:engine", settings={"name": "engine-0"})

    async def main() -> None:
        cluster = await LocalLauncher(
            [role], log_dir=tmp_path, directory=directory, start_deadline_s=DEADLINE_S, shares_gpu=True
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


def test_a_start_that_fails_leaves_none(tmp_path, installed):
    directory = create_segment_directory()
    role = RoleSpec(name="engine-0", kind="engine", factory="toy_roles:leaver", settings={})

    async def main() -> None:
        launcher = LocalLauncher(
            [role], log_dir=tmp_path, directory=directory, start_deadline_s=DEADLINE_S, shares_gpu=True
        )
        with pytest.raises(Exception, match="engine-0 died"):
            await launcher.spawn()

    asyncio.run(main())
    assert (tmp_path / "gpu-service.log").exists() and holders_of(tmp_path / "gpu-service.log") == []
    assert not directory.exists()


def test_the_guardian_ends_it_when_the_controller_is_killed(tmp_path, installed):
    program = (
        "import asyncio, sys, time; from pathlib import Path; from headrace.launch import gpu_service\n"
        "from headrace.launch.guardian import Guardian\n"
        f"gpu_service._DRIVER, gpu_service.TRY = Path({str(tmp_path / 'driver')!r}), {COMPUTES!r}\n"
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
    assert process_start(pid) is not None
    controller.kill()
    controller.wait(DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while process_start(pid) is not None:
        assert time.monotonic() < deadline, "waited for the guardian to end the service"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("told", "answer"),
    [
        ({"rollout.max_lag": 1}, True),
        ({"rollout.max_lag": 0}, False),
        ({"rollout.max_lag": 1, "model.device": "cpu"}, False),
        ({"rollout.max_lag": 1, "run.launcher": "inline"}, False),
        ({"rollout.max_lag": 1, "trainer.ranks": 2}, False),
    ],
)
def test_runs_whose_roles_take_turns_need_none(told, answer):
    assert build.may_share_gpu(from_dict(told, training=False)) is answer


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
