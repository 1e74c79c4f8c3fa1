"""Trainer or engine killed at random moments of an update, for more than fifty rounds over the transports of the
host and ten for each bundle of a GPU's: no engine ever computes with mixed weights, or with other weights than those
of the version it claims."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch
from weight_program import PROBE
from weight_tools import WAYS, publisher_of, write_checkpoint

from headrace.doctor import MISMATCH
from headrace.types import WeightManifest
from headrace.wire import decode, encode

ROUNDS = 9
GPU_ROUNDS = 10
DEADLINE_S = 120.0
PROGRAM = [sys.executable, str(Path(__file__).with_name("weight_program.py"))]
CELLS = [
    (bundle, transport)
    for bundle in ("full", "delta", "adapter")
    for transport in ("shared_memory", "files", "collective")
]
GPU_CELLS = [
    *(
        pytest.param(
            bundle,
            "cuda_ipc",
            id=f"{bundle}-cuda_ipc",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC needs a GPU"),
        )
        for bundle in ("full", "adapter")
    ),
    pytest.param(
        "full",
        "nccl",
        id="full-collective-nccl",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs"),
    ),
]


class GoneError(Exception):
    """The process at the other end was killed."""


class Lines:
    """Orders to another process, each answered by a line."""

    def __init__(self, orders: int, answers: int) -> None:
        self._orders, self._answers, self._rest = orders, answers, b""

    def ask(self, order: str) -> str:
        try:
            os.write(self._orders, f"{order}\n".encode())
        except BrokenPipeError:
            raise GoneError from None
        return self.line()

    def line(self) -> str:
        """The next line; one that was cut off by death counts as none."""
        while b"\n" not in self._rest:
            assert select.select([self._answers], [], [], DEADLINE_S)[0], "no answer"
            if not (part := os.read(self._answers, 1 << 16)):
                raise GoneError
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        os.close(self._orders)
        os.close(self._answers)


class Starter(Protocol):
    def start(self, *what: str) -> End: ...


class Nursery:
    """Starts ends by forking."""

    def __init__(self, checkpoint: Path, pipes: Path) -> None:
        pipes.mkdir()
        self._pipes, self._num_started = pipes, 0
        self._process = subprocess.Popen(
            [*PROGRAM, str(checkpoint)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._lines = Lines(self._process.stdin.fileno(), self._process.stdout.fileno())
        assert self._lines.line() == "ready"

    def start(self, *what: str) -> End:
        self._num_started += 1
        paths = [str(self._pipes / f"{self._num_started}-{name}") for name in ("orders", "answers")]
        for path in paths:
            os.mkfifo(path)
        pid = int(self._lines.ask(json.dumps([*paths, *what])))
        orders, answers = paths
        return End(pid, os.open(orders, os.O_WRONLY), os.open(answers, os.O_RDONLY))

    def close(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self._process.stdin.close()
        self._process.stdout.close()


class Crowd:
    """Starts all ends that will be needed at once: a process that has used a GPU cannot be forked, and another takes
    seconds until it can."""

    def __init__(self, checkpoint: Path, wanted: list[tuple[str, ...]]) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._waiting: list[tuple[tuple[str, ...], End]] = []
        for what in wanted:
            (its_orders, orders), (answers, its_answers) = os.pipe(), os.pipe()
            process = subprocess.Popen(
                [*PROGRAM, str(checkpoint), *what], env=environment(), stdin=its_orders, stdout=its_answers
            )
            os.close(its_orders)
            os.close(its_answers)
            self._processes.append(process)
            self._waiting.append((what, End(process.pid, orders, answers)))

    def start(self, *what: str) -> End:
        place = [waiting for waiting, _ in self._waiting].index(what)
        return self._waiting.pop(place)[1]

    def close(self) -> None:
        for _, end in self._waiting:
            end.close()
        for process in self._processes:
            process.kill()
            process.wait(DEADLINE_S)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class End(Lines):
    """A sender or an engine as a process."""

    def __init__(self, pid: int, orders: int, answers: int) -> None:
        self._pid = pid
        super().__init__(orders, answers)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


class Pair:
    """A sender and an engine, either of which may die and be replaced, and the truth about every version."""

    def __init__(self, starter: Starter, checkpoint: Path, bundle: str, way: str, place: Path) -> None:
        self._starter, self._way = starter, way
        self._what = what_is_needed(bundle, way, place)
        self.truth = publisher_of(bundle, checkpoint, sender=None, device=WAYS[way].trainer)
        self.logprobs = {0: self.truth.logprobs(PROBE)}
        self.sender, self.engine = (self._start(name) for name in self._what)

    def _start(self, name: str) -> End:
        end = self._starter.start(*self._what[name])
        assert end.line() == "ready"
        return end

    def advance(self, version: int) -> None:
        self.truth.advance(version)
        self.logprobs[version] = self.truth.logprobs(PROBE)

    def publish(self, version: int) -> WeightManifest:
        manifest: WeightManifest = decode(bytes.fromhex(self.sender.ask(f"publish {version}")))
        return manifest

    def update(self, version: int) -> None:
        """As ``WeightSync`` does it: what cannot be taken is followed by all weights."""
        manifest = self.publish(version)
        for _ in range(4):
            answer = self.engine.ask(f"apply {encode(manifest).hex()}")
            if answer == f"applied {version}":
                break
            assert answer.startswith("error "), answer
            manifest = decode(bytes.fromhex(self.sender.ask("whole")))
        else:
            raise AssertionError(f"version {version} did not land: {answer}")
        self.sender.ask(f"retire {version}")

    def check(self, *allowed: int) -> int:
        """What the engine computes with is exactly the version that it claims; returns that version."""
        version, digest, logprobs = json.loads(self.engine.ask("look"))
        assert version in allowed
        assert digest == self.truth.digests[version]
        gaps = np.abs(np.array(logprobs) - self.logprobs[version])
        # On a GPU both compute in bfloat16, each in its own order.
        if WAYS[self._way].engine == "cpu":
            assert gaps.max() <= 1e-4
        else:
            assert gaps.mean() <= MISMATCH["bfloat16"]
        return version

    def replace(self, victim: str) -> None:
        getattr(self, victim).close()
        setattr(self, victim, self._start(victim))

    def close(self) -> None:
        for end in (self.sender, self.engine):
            end.kill()
            end.close()


def what_is_needed(bundle: str, way: str, place: Path) -> dict[str, tuple[str, ...]]:
    return {"sender": ("sender", way, bundle, str(place)), "engine": ("engine", way, bundle)}


def disturbed_update(pair: Pair, version: int, victim: str, delay_s: float) -> None:
    """An update during which the victim is killed, or at the latest at its end."""
    end = getattr(pair, victim)
    killer = threading.Timer(delay_s, end.kill)
    killer.start()
    try:
        pair.update(version)
    except GoneError:
        pass
    finally:
        killer.join()


@pytest.fixture(scope="module")
def ready_checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), num_layers=6, intermediate_size=4096)


@pytest.fixture(scope="module")
def ready(ready_checkpoint, tmp_path_factory):
    nursery = Nursery(ready_checkpoint, tmp_path_factory.mktemp("ends") / "pipes")
    yield nursery, ready_checkpoint
    nursery.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("bundle", "transport"), CELLS)
def test_a_kill_never_leaves_an_engine_mixed_or_silently_old(ready, tmp_path, bundle, transport):
    draw = random.Random(f"{bundle} {transport}")
    nursery, checkpoint = ready
    pair = Pair(nursery, checkpoint, bundle, transport, tmp_path / "place")
    try:
        kill_by_turns(pair, draw, victims_of(draw, ROUNDS))
    finally:
        pair.close()


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("bundle", "way"), GPU_CELLS)
def test_a_kill_beside_a_gpu_never_leaves_an_engine_mixed_or_silently_old(
    ready_checkpoint, tmp_path, bundle, way
):
    draw = random.Random(f"{bundle} {way}")
    victims = victims_of(draw, GPU_ROUNDS)
    needed = what_is_needed(bundle, way, tmp_path / "place")
    crowd = Crowd(ready_checkpoint, [needed[name] for name in [*needed, *victims]])
    try:
        pair = Pair(crowd, ready_checkpoint, bundle, way, tmp_path / "place")
        kill_by_turns(pair, draw, victims)
        pair.close()
    finally:
        crowd.close()


def victims_of(draw: random.Random, num_rounds: int) -> list[str]:
    """Both ends among them."""
    victims = ["sender", "engine", *(draw.choice(["sender", "engine"]) for _ in range(num_rounds - 2))]
    draw.shuffle(victims)
    return victims


def kill_by_turns(pair: Pair, draw: random.Random, victims: list[str]) -> None:
    for version in (1, 2):
        pair.advance(version)
        start = time.monotonic()
        pair.update(version)
        usual_s = time.monotonic() - start
        pair.check(version)
    for version, victim in enumerate(victims, start=3):
        pair.advance(version)
        disturbed_update(pair, version, victim, draw.uniform(0.0, usual_s))
        if victim == "sender":
            # The engine lives: it has the old weights or the new ones, and knows which.
            pair.check(version - 1, version)
        pair.replace(victim)
        pair.update(version)
        pair.check(version)
