"""A teacher's weights change while the policy decodes: not one decode step is lost, and no token differs."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.engines.checkpoint_reader import CheckpointReader
from headrace.engines.driver import EngineDriver
from headrace.engines.make import torch_engine
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.tensors import to_blobs
from headrace.runtime.linked_weights import TRANSPORT, LinkedWeights
from headrace.runtime.snapshots import DelayedWeights
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import Request, Sampling
from headrace.weights.shared_memory import SharedMemorySender
from headrace.weights.transports import TransportReceiver

VOCAB, NUM_REQUESTS, NUM_VERSIONS, LAG, STEPS_BETWEEN = 61, 6, 6, 2, 3
TEXT = np.random.default_rng(0).integers(0, VOCAB, 40).astype(np.int32)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One for each version of the policy."""
    folder = tmp_path_factory.mktemp("versions")
    for version in range(NUM_VERSIONS):
        make_tiny_model(
            folder / str(version),
            vocab_size=VOCAB,
            init_std=0.12,
            tie_embeddings=False,
            context_tokens=256,
            seed=version,
        )
    return [folder / str(version) for version in range(NUM_VERSIONS)]


class WatchedEngine:
    """A driver over a real engine that notes, for every step, what ran and what was sampled."""

    def __init__(self, checkpoint, name: str) -> None:
        self.ledger = TimeLedger(ENGINE_ACTIVITIES)
        self.core = torch_engine(load_model(checkpoint), ledger=self.ledger, max_running=8, kv_tokens=2048)
        receiver = TransportReceiver({TRANSPORT: CheckpointReader("float32")})
        self.driver = EngineDriver(self.core, receiver, ledger=self.ledger, name=name)
        self.steps: list[tuple[int, int]] = []
        step = self.core.step

        def watched():
            before = self.core.counters()
            done = step()
            after = self.core.counters()
            sampled = after["generated_tokens"] - before["generated_tokens"]
            self.steps.append((int(before["running"] + before["waiting"]), int(sampled)))
            return done

        self.core.step = watched


def requests() -> list[Request]:
    rng = np.random.default_rng(7)
    return [
        Request(
            id=str(i),
            prompt_ids=rng.integers(0, VOCAB, 9).astype(np.int32),
            sampling=Sampling(max_tokens=60),
            seed=i,
        )
        for i in range(NUM_REQUESTS)
    ]


async def decode_beside_a_link(checkpoints, folder):
    """The teacher's folder is a link that is made to point to one checkpoint after the other."""
    rollouts, teacher = WatchedEngine(checkpoints[0], "engine-0"), WatchedEngine(checkpoints[0], "teacher")
    link = folder / "teacher"
    link.symlink_to(checkpoints[0])
    weights = LinkedWeights(teacher.driver, link, deadline_s=60.0)
    running = [asyncio.create_task(rollouts.driver.generate(request)) for request in requests()]
    scores = {}
    for version, checkpoint in enumerate(checkpoints):
        (folder / "next").symlink_to(checkpoint)
        (folder / "next").rename(link)
        await weights.look(version)
        (scores[await weights.current()],) = await teacher.driver.score([TEXT])
        for _ in range(STEPS_BETWEEN):
            await asyncio.sleep(0)
    assert not any(task.done() for task in running), "the swaps came after the decoding"
    completions = await asyncio.gather(*running)
    for engine in (rollouts, teacher):
        await engine.driver.close()
    return rollouts, weights, completions, scores


async def decode(checkpoints, segments, *, swapping: bool):
    rollouts, teacher = WatchedEngine(checkpoints[0], "engine-0"), WatchedEngine(checkpoints[0], "teacher")
    sender = SharedMemorySender(segments)
    follower = DelayedWeights(teacher.driver, lag=LAG, deadline_s=60.0)
    running = [asyncio.create_task(rollouts.driver.generate(request)) for request in requests()]
    scores = {}
    for version, checkpoint in enumerate(checkpoints if swapping else ()):
        manifest = sender.send(version, to_blobs(load_model(checkpoint)))
        for retired in await follower.landed(manifest):
            sender.retire(retired)
        (scores[follower.version],) = await teacher.driver.score([TEXT])
        for _ in range(STEPS_BETWEEN):
            await asyncio.sleep(0)
    assert not swapping or not any(task.done() for task in running), "the swaps came after the decoding"
    completions = await asyncio.gather(*running)
    for engine in (rollouts, teacher):
        await engine.driver.close()
    sender.close()
    return rollouts, follower, completions, scores


@pytest.mark.parametrize("linked", [False, True], ids=["snapshots", "folders"])
def test_no_decode_step_stalls_while_a_teacher_is_swapped(checkpoints, tmp_path, linked):
    swapping = decode_beside_a_link(checkpoints, tmp_path) if linked else None
    swapping = swapping or decode(checkpoints, tmp_path / "a", swapping=True)
    rollouts, swapped, completions, scores = asyncio.run(swapping)
    alone, _, undisturbed, _ = asyncio.run(decode(checkpoints, tmp_path / "b", swapping=False))
    # The first folder is the one the teacher was built from.
    assert swapped.num_swaps == (NUM_VERSIONS - 1 if linked else NUM_VERSIONS - LAG)
    # Every step of the engine that samples gave every request a token, and there are no more steps than without.
    stalled = [step for step, (running, sampled) in enumerate(rollouts.steps) if sampled < running]
    assert stalled == []
    assert rollouts.steps == alone.steps
    assert rollouts.ledger.seconds()["paused-for-weights"] == 0.0
    for got, expected in zip(completions, undisturbed, strict=True):
        assert np.array_equal(got.token_ids, expected.token_ids)
        assert np.array_equal(got.logprobs, expected.logprobs)
        assert set(got.versions.tolist()) == {0}
    # The teacher really was each of the versions in turn.
    assert sorted(scores) == list(range(NUM_VERSIONS if linked else NUM_VERSIONS - LAG))
    for version, scored in scores.items():
        engine = torch_engine(load_model(checkpoints[version]), ledger=TimeLedger(ENGINE_ACTIVITIES))
        np.testing.assert_array_equal(scored, engine.score([TEXT])[0])
