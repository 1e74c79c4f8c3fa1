from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigError, DeadlineError, ModelError, RoleError, WeightSyncError
from headrace.launch.local import LocalCluster, LocalLauncher, RoleSpec
from headrace.types import (
    Episode,
    Request,
    Sample,
    Sampling,
    Task,
    TrainBatch,
    Trajectory,
    Turn,
)
from headrace.weights.segment_directory import process_start
from headrace.weights.shared_memory import create_segment_directory, segment_root, sweep

HERE = Path(__file__).parent
DEADLINE_S = 60.0


def is_running(pid: int) -> bool:
    return process_start(pid) is not None


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s for {what}"
        time.sleep(0.01)


def engine_spec(name: str = "engine-0", factory: str = "engine", **settings: Any) -> RoleSpec:
    return RoleSpec(
        name=name, kind="engine", factory=f"toy_roles:{factory}", settings={"name": name, **settings}
    )


def request(prompt: Sequence[int] = (5, 6), max_tokens: int = 3, id: str = "0/0/0") -> Request:
    return Request(
        id=id,
        prompt_ids=np.array(prompt, dtype=np.int32),
        sampling=Sampling(max_tokens=max_tokens),
        seed=7,
    )


@asynccontextmanager
async def cluster_of(tmp_path: Path, *roles: RoleSpec, **options: Any) -> AsyncIterator[LocalCluster]:
    """A cluster that must be gone, with all it made, when the block ends."""
    directory = options.pop("directory", None) or create_segment_directory()
    launcher = LocalLauncher(
        roles, log_dir=tmp_path, directory=directory, start_deadline_s=DEADLINE_S, heartbeat_s=0.05, **options
    )
    cluster = await launcher.spawn()
    try:
        yield cluster
    finally:
        await cluster.close()
        assert [name for name, pid in cluster.pids.items() if is_running(pid)] == []
        assert not directory.exists()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test()

    asyncio.run(main())


def sample(num_tokens: int, attempt: int = 0) -> Sample:
    mask = np.arange(num_tokens) % 2 == 1
    return Sample(
        group=1,
        attempt=attempt,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=-mask.astype(np.float32),
        versions=np.where(mask, 4, -1).astype(np.int32),
        advantages=mask.astype(np.float32),
        temperature=1.0,
        kv_versions=np.array([[4, num_tokens]], dtype=np.int32),
    )


def test_every_method_of_every_role_makes_the_round_trip(tmp_path):
    directory = create_segment_directory()
    trainer = RoleSpec(
        name="trainer",
        kind="trainer",
        factory="toy_roles:trainer",
        settings={"directory": str(directory / "weights")},
    )
    scorer = RoleSpec(name="scorer-0", kind="scorer", factory="toy_roles:scorer", settings={"scale": 2.0})

    async def test() -> None:
        roles = (engine_spec(), engine_spec("engine-1"), trainer, scorer)
        async with cluster_of(tmp_path, *roles, directory=directory) as cluster:
            await check_engine(cluster)
            await check_trainer(cluster, tmp_path)
            await check_weights(cluster)
            await check_scorer(cluster)
            await check_heartbeats(cluster)

    run(test)
    assert "engine-0 closed" in (tmp_path / "engine-0.log").read_text()


async def check_engine(cluster: LocalCluster) -> None:
    engine = cluster.engines[0]
    assert [e.name for e in cluster.engines] == ["engine-0", "engine-1"]
    progress: list[list[int]] = []
    answer = await engine.generate(request(), on_progress=lambda c: progress.append(c.token_ids.tolist()))
    assert progress == [[7], [7, 8], [7, 8, 9]]
    assert answer.token_ids.tolist() == [7, 8, 9]
    assert (answer.token_ids.dtype, answer.logprobs.dtype) == (np.int32, np.float32)
    assert answer.kv_versions.tolist() == [[0, 3]]
    scores = await engine.score([np.arange(3), np.arange(2)], temperature=0.5)
    assert [s.tolist() for s in scores] == [[0, 0.5, 1.0], [0, 0.5]]

    first_token = asyncio.Event()
    endless = asyncio.create_task(
        engine.generate(request((0, 6), id="1/0/0"), on_progress=lambda _: first_token.set())
    )
    await first_token.wait()
    await engine.abort(["1/0/0", "unknown"])
    partial = await endless
    assert (partial.token_ids.tolist(), partial.finish_reason) == ([7], "abort")

    await engine.begin_update("block")
    assert "block" in (await engine.status()).seconds
    await engine.cancel_update()
    assert "cancelled" in (await engine.status()).seconds


async def check_trainer(cluster: LocalCluster, tmp_path: Path) -> None:
    trainer = cluster.trainer
    samples = tuple(sample(200_000, attempt) for attempt in range(4))
    result = await trainer.step(TrainBatch(step=5, version=4, samples=samples))
    assert (result.step, result.version, result.num_loss_tokens) == (5, 5, 400_000)
    assert result.metrics == {"logprobs": -400_000.0}
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    await trainer.save(checkpoint)
    await trainer.step(TrainBatch(step=9, version=8, samples=()))
    assert await trainer.load(checkpoint) == 5
    assert (await trainer.status()).version == 5


async def check_weights(cluster: LocalCluster) -> None:
    manifests = [await cluster.trainer.publish(version) for version in (1, 2)]
    for manifest in manifests:
        for engine in cluster.engines:
            assert await engine.apply(manifest) == manifest.version
            assert (await engine.status()).counters == {"w": 1000.0 * manifest.version}
    await cluster.trainer.retire(1)
    with pytest.raises(WeightSyncError, match="was retired"):
        await cluster.engines[0].apply(manifests[0])
    assert (await cluster.engines[0].status()).version == 2


async def check_scorer(cluster: LocalCluster) -> None:
    task = Task(id="t", prompt=({"role": "user", "content": "hi"},), columns={"extra": "style"})
    turn = Turn(
        prompt_ids=np.array([5, 6], dtype=np.int32),
        completion=await cluster.engines[0].generate(request()),
        sampling=Sampling(max_tokens=3),
        seed=7,
        engine="engine-0",
    )
    episodes = [
        Episode(group=0, attempt=i, task=task, trajectories=(Trajectory(turns=(turn,), text="x"),))
        for i in range(2)
    ]
    scores = await cluster.scorers[0].score(task, episodes)
    assert scores == [{"attempt": 0.0, "style": None}, {"attempt": 2.0, "style": None}]


async def check_heartbeats(cluster: LocalCluster) -> None:
    """Progress is told without being asked for."""
    expected = {"engine-0": 7, "engine-1": 0, "trainer": 5, "scorer-0": 1}
    while {name: s.progress for name, s in (await cluster.statuses()).items()} != expected:
        await asyncio.sleep(0.01)
    scorer = (await cluster.statuses())["scorer-0"]
    assert set(scorer.seconds) == {"loading", "working", "idle-no-work"}


def test_exception_in_a_role_arrives_with_its_traceback_and_the_role_lives_on(tmp_path):
    async def test() -> None:
        async with cluster_of(tmp_path, engine_spec(factory="faulty", fault="raise")) as cluster:
            with pytest.raises(
                RoleError, match=r"engine-0\.score raised ZeroDivisionError: toy fault"
            ) as caught:
                await cluster.engines[0].score([])
            assert "toy_roles.py" in str(caught.value.__cause__)
            assert (await cluster.engines[0].generate(request())).num_tokens == 3

    run(test)


def test_killed_role_is_named_and_its_calls_fail(tmp_path):
    async def test() -> None:
        async with cluster_of(tmp_path, engine_spec(), engine_spec("engine-1")) as cluster:
            started = asyncio.Event()
            call = asyncio.create_task(
                cluster.engines[1].generate(request((0, 1)), on_progress=lambda _: started.set())
            )
            await started.wait()
            os.kill(cluster.pids["engine-1"], signal.SIGKILL)
            failure = await cluster.wait_failure()
            assert "engine-1 died (killed by SIGKILL)" in str(failure)
            with pytest.raises(RoleError, match=r"engine-1 died \(killed by SIGKILL\)"):
                await call
            with pytest.raises(RoleError, match="engine-1 died"):
                await cluster.engines[1].status()
            assert (await cluster.engines[0].generate(request())).num_tokens == 3
            assert await cluster.wait_failure() is failure

    run(test)


@pytest.mark.parametrize(
    ("fault", "cause", "shown"),
    [("exit", "exit code 7", "about to leave"), ("background", "exit code 70", "toy background fault")],
)
def test_death_shows_the_end_of_the_roles_log(tmp_path, fault, cause, shown):
    (tmp_path / "engine-0.log").write_text("lines of an earlier run\n")

    async def test() -> None:
        async with cluster_of(tmp_path, engine_spec(factory="faulty", fault=fault)) as cluster:
            call = asyncio.create_task(cluster.engines[0].score([]))
            failure = await cluster.wait_failure()
            assert f"engine-0 died ({cause})" in str(failure)
            assert shown in str(failure)
            assert "earlier run" not in str(failure)
            with pytest.raises(RoleError, match=shown):
                await call
            if fault == "background":
                assert "_explode" in str(failure.__cause__)

    run(test)


def test_interrupt_is_ignored_and_a_terminated_role_closes_in_order(tmp_path):
    async def test() -> None:
        async with cluster_of(tmp_path, engine_spec()) as cluster:
            # Ctrl-C at a terminal reaches the controller's group; a stray SIGINT changes nothing either.
            assert os.getpgid(cluster.pids["engine-0"]) != os.getpgid(0)
            os.kill(cluster.pids["engine-0"], signal.SIGINT)
            assert (await cluster.engines[0].generate(request())).num_tokens == 3
            os.kill(cluster.pids["engine-0"], signal.SIGTERM)
            assert "engine-0 died (exit code 143)" in str(await cluster.wait_failure())
            assert "engine-0 closed" in (tmp_path / "engine-0.log").read_text()

    run(test)


def test_role_that_will_not_end_is_killed_with_what_it_started(tmp_path, caplog):
    async def test() -> None:
        roles = (
            engine_spec(factory="faulty", fault="hang"),
            engine_spec("engine-1", factory="faulty", fault="child"),
        )
        async with cluster_of(tmp_path, *roles, close_deadline_s=0.2) as cluster:
            stuck = asyncio.create_task(cluster.engines[0].score([]))
            grandchild = int((await cluster.engines[1].score([]))[0][0])
            assert is_running(grandchild)
            await cluster.close()
            with pytest.raises(RoleError, match="engine-0 was closed"):
                await stuck
            wait_until(lambda: not is_running(grandchild), "the role's own child to end")

    run(test)
    assert "engine-0 did not end within 0.2 s" in caplog.text


def test_role_that_cannot_close_says_so_after_everything_ended(tmp_path):
    directory = create_segment_directory()

    async def test() -> None:
        role = engine_spec(factory="faulty", fault="close")
        with pytest.raises(RoleError, match=r"(?s)engine-0 died \(exit code 70\).*toy close fault"):
            async with cluster_of(tmp_path, role, directory=directory):
                pass

    run(test)
    assert running_roles(tmp_path) == []
    assert not directory.exists()


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        ("bad_model", ModelError, r"^model 'toy' has no layers; choose another$"),
        ("leaver", RoleError, r"(?s)engine-1 died \(exit code 9\).*leaving while being built"),
        ("absent", ConfigError, r"toy_roles has no function 'absent'"),
    ],
)
def test_role_that_cannot_start_stops_the_others_and_keeps_its_error(tmp_path, factory, error, message):
    directory = create_segment_directory()

    async def test() -> None:
        roles = [engine_spec(), engine_spec("engine-1", factory=factory)]
        launcher = LocalLauncher(roles, log_dir=tmp_path, directory=directory, start_deadline_s=DEADLINE_S)
        with pytest.raises(error, match=message):
            await launcher.spawn()

    run(test)
    assert not directory.exists()
    assert running_roles(tmp_path) == []


def test_start_deadline_names_the_late_role(tmp_path):
    async def test() -> None:
        roles = [engine_spec(factory="sleeper")]
        launcher = LocalLauncher(roles, log_dir=tmp_path, start_deadline_s=0.05)
        with pytest.raises(DeadlineError, match=r"engine-0 did not start within 0\.05 s"):
            await launcher.spawn()

    run(test)
    assert running_roles(tmp_path) == []


def test_cancelled_start_leaves_nothing(tmp_path):
    directory = create_segment_directory()

    async def test() -> None:
        launcher = LocalLauncher([engine_spec(factory="sleeper")], log_dir=tmp_path, directory=directory)
        start = asyncio.create_task(launcher.spawn())
        while not running_roles(tmp_path):
            await asyncio.sleep(0.01)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    run(test)
    assert not directory.exists()
    assert running_roles(tmp_path) == []


def running_roles(log_dir: Path) -> list[int]:
    """Processes that hold a log of this directory open."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if Path(os.readlink(entry)).parent == log_dir and is_running(int(entry.parts[2])):
                found.append(int(entry.parts[2]))
        except OSError:
            continue
    return found


def test_roles_must_have_names_of_their_own(tmp_path):
    with pytest.raises(ConfigError, match="name of its own"):
        LocalLauncher([engine_spec(), engine_spec()], log_dir=tmp_path)


@pytest.fixture
def controller(tmp_path):
    """A controller process with its roles, and what it says it made."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(HERE / "controller_program.py"), str(tmp_path)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    made = json.loads(process.stdout.readline())
    assert all(is_running(pid) for pid in made["pids"].values())
    assert Path(made["segment"]).exists()
    yield process, made
    process.kill()
    process.wait(DEADLINE_S)
    process.stdout.close()


def test_killed_controller_leaves_no_process_segment_or_socket(controller):
    process, made = controller
    process.kill()
    for name, pid in made["pids"].items():
        wait_until(lambda pid=pid: not is_running(pid), f"{name} to end")
    assert not Path(made["directory"]).exists()


def test_roles_leave_and_the_next_start_sweeps_when_the_guardian_was_killed_too(controller):
    process, made = controller
    os.kill(made["pids"]["guardian"], signal.SIGKILL)
    wait_until(lambda: not is_running(made["pids"]["guardian"]), "the guardian to end")
    process.kill()
    process.wait(DEADLINE_S)
    for name, pid in made["pids"].items():
        wait_until(lambda pid=pid: not is_running(pid), f"{name} to end")
    sweep(segment_root())
    assert not Path(made["directory"]).exists()


def test_readers_death_leaves_the_segment_to_other_readers(tmp_path):
    directory = create_segment_directory()
    trainer = RoleSpec(
        name="trainer", kind="trainer", factory="toy_roles:trainer", settings={"directory": str(directory)}
    )

    async def test() -> None:
        roles = (engine_spec(), engine_spec("engine-1"), trainer)
        async with cluster_of(tmp_path, *roles, directory=directory) as cluster:
            manifest = await cluster.trainer.publish(3)
            await cluster.engines[0].apply(manifest)
            os.kill(cluster.pids["engine-0"], signal.SIGKILL)
            await cluster.wait_failure()
            assert Path(manifest.location).exists()
            assert await cluster.engines[1].apply(manifest) == 3

    run(test)
