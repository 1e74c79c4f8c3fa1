"""Trainer or engine killed at random moments of an update, for more than fifty rounds over all transports: no engine
ever computes with mixed weights, or with other weights than those of the version it claims."""

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

import numpy as np
import pytest
from weight_program import PROBE
from weight_tools import publisher_of, write_checkpoint

from headrace.types import WeightManifest
from headrace.wire import decode, encode

ROUNDS = 9
DEADLINE_S = 120.0
CELLS = [
    (bundle, transport)
    for bundle in ("full", "delta", "adapter")
    for transport in ("shared_memory", "files", "collective")
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


class Nursery:
    """Starts ends by forking."""

    def __init__(self, checkpoint: Path, pipes: Path) -> None:
        pipes.mkdir()
        self._pipes, self._num_started = pipes, 0
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("weight_program.py")), str(checkpoint)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
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
        return End(pid, *paths)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self._process.stdin.close()
        self._process.stdout.close()


class End(Lines):
    """A sender or an engine as a process."""

    def __init__(self, pid: int, orders: str, answers: str) -> None:
        self._pid = pid
        super().__init__(os.open(orders, os.O_WRONLY), os.open(answers, os.O_RDONLY))
        assert self.line() == "ready"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


class Pair:
    """A sender and an engine, either of which may die and be replaced, and the truth about every version."""

    def __init__(self, nursery: Nursery, checkpoint: Path, bundle: str, transport: str, place: Path) -> None:
        self._nursery = nursery
        self._what = {"sender": ("sender", transport, bundle, str(place)), "engine": ("engine", bundle)}
        self.truth = publisher_of(bundle, checkpoint, sender=None)
        self.logprobs = {0: self.truth.logprobs(PROBE)}
        self.sender, self.engine = (nursery.start(*what) for what in self._what.values())

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
        np.testing.assert_allclose(logprobs, self.logprobs[version], atol=1e-4)
        return version

    def replace(self, victim: str) -> None:
        getattr(self, victim).close()
        setattr(self, victim, self._nursery.start(*self._what[victim]))

    def close(self) -> None:
        for end in (self.sender, self.engine):
            end.kill()
            end.close()


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
def ready(tmp_path_factory):
    place = tmp_path_factory.mktemp("ends")
    checkpoint = write_checkpoint(place / "model", num_layers=6, intermediate_size=4096)
    nursery = Nursery(checkpoint, place / "pipes")
    yield nursery, checkpoint
    nursery.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("bundle", "transport"), CELLS)
def test_a_kill_never_leaves_an_engine_mixed_or_silently_old(ready, tmp_path, bundle, transport):
    draw = random.Random(f"{bundle} {transport}")
    nursery, checkpoint = ready
    pair = Pair(nursery, checkpoint, bundle, transport, tmp_path / "place")
    try:
        for version in (1, 2):
            pair.advance(version)
            start = time.monotonic()
            pair.update(version)
            usual_s = time.monotonic() - start
            pair.check(version)
        ended = {"sender": 0, "engine": 0}
        for version in range(3, 3 + ROUNDS):
            victim = draw.choice(["sender", "engine"])
            pair.advance(version)
            disturbed_update(pair, version, victim, draw.uniform(0.0, usual_s))
            ended[victim] += 1
            if victim == "sender":
                # The engine lives: it has the old weights or the new ones, and knows which.
                pair.check(version - 1, version)
            pair.replace(victim)
            pair.update(version)
            pair.check(version)
        assert all(ended.values()), ended
    finally:
        pair.close()
