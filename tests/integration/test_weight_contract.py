"""Every way weights can reach an engine keeps one contract: an update lands whole or not at all, an engine that
could not take one serves its old weights, says so, and catches up.

The cells of the matrix are bundle x transport x interrupt mode. Those that need hardware which is not here are
skipped, with the reason.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from weight_tools import (
    DAMAGE,
    EXPERT_LORA,
    LORA,
    WAYS,
    AdapterPublisher,
    Publisher,
    digest_of,
    make_engine,
    request,
    sender_for,
    write_checkpoint,
)

from headrace.errors import WeightSyncError
from headrace.models.checkpoint_names import CheckpointNamed
from headrace.models.loading import load_model
from headrace.runtime.weight_sync import WeightSync

WAIT_S = 60.0
MODES = ("never", "drain", "abort", "block")
BUNDLES = ("full", "delta", "adapter")
ON_HOST = [
    pytest.param(bundle, transport, id=f"{bundle}-{transport}")
    for bundle in BUNDLES
    for transport in ("shared_memory", "files", "collective")
]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC needs a GPU")
ONE_GPU = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU for the trainer and one for each engine"
)
ON_GPU = [
    pytest.param(bundle, "cuda_ipc", id=f"{bundle}-cuda_ipc", marks=NO_GPU) for bundle in ("full", "adapter")
]
NOT_BESIDE = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="CUDA IPC from one GPU to another needs two"
)
ON_GPUS = [pytest.param(bundle, "nccl", id=f"{bundle}-collective-nccl", marks=ONE_GPU) for bundle in BUNDLES]
BETWEEN_GPUS = [
    pytest.param(bundle, "cuda_ipc-two_gpus", id=f"{bundle}-cuda_ipc-two_gpus", marks=NOT_BESIDE)
    for bundle in ("full", "adapter")
]
HERE = [*ON_HOST, *ON_GPU, *BETWEEN_GPUS, *ON_GPUS]
MATRIX = [
    *HERE,
    pytest.param(
        "delta",
        "cuda_ipc",
        id="delta-cuda_ipc",
        marks=pytest.mark.skip(reason="refused: weights that stay on a GPU are copied faster than compared"),
    ),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


class World:
    """One trainer, two engines (one where each needs a GPU of its own), and the sync between them."""

    def __init__(self, checkpoint, sender, mode, way=WAYS["files"], bundle="full", lora=LORA):
        self.way = way
        self.lora = lora if bundle == "adapter" else None
        self.policy = lora.policy if self.lora else "policy"
        self.publisher = (
            AdapterPublisher(checkpoint, sender, device=way.trainer, lora=lora)
            if self.lora
            else Publisher(checkpoint, sender, device=way.trainer)
        )
        self.engines = [
            make_engine(checkpoint, f"engine-{i}", device=way.engine, lora=self.lora)
            for i in range(way.num_engines)
        ]
        self.warnings = []
        self.sync = self.sync_of(self.engines, mode)

    def sync_of(self, engines, mode):
        return WeightSync(
            engines,
            self.publisher,
            mode=mode,
            deadline_s=WAIT_S,
            drain_s=WAIT_S,
            step_s=WAIT_S,
            warn=self.warnings.append,
        )

    async def update(self, version, sync=None):
        sync = sync or self.sync
        manifest = await sync.publish(version)
        await sync.land(manifest)
        await sync.retire(version)
        return manifest

    async def check(self, version=None):
        """The engines compute with the trainer's weights: by digest, and by what they compute."""
        version = self.publisher.version if version is None else version
        ids = np.arange(1, 30, dtype=np.int32)
        for engine in self.engines:
            assert (await engine.status()).version == version
            weights = engine._core.weights(policy=self.policy if self.lora else None)
            assert digest_of(weights) == self.publisher.digests[version]
            if version == self.publisher.version and self.publisher.model.device.type == "cpu":
                (scored,) = await engine.score([ids], policy=self.policy)
                np.testing.assert_allclose(scored, self.publisher.logprobs(ids), atol=1e-4)

    async def close(self):
        self.publisher.sender.close()
        for engine in self.engines:
            await engine.close()


@pytest.fixture
def in_world(checkpoint, tmp_path):
    """Run a scenario with a world of its own."""

    def run(bundle, transport, mode, scenario, *, deadline_s=20.0):
        async def main():
            sender = sender_for(
                way.transport, bundle, tmp_path, num_receivers=way.num_engines, deadline_s=deadline_s
            )
            world = World(checkpoint, sender, mode, way, bundle)
            try:
                await scenario(world)
            finally:
                await world.close()

        way = WAYS[transport]
        with way.entered():
            asyncio.run(asyncio.wait_for(main(), WAIT_S))

    return run


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("bundle", "transport"), MATRIX)
def test_updates_land_whole_while_requests_run(in_world, bundle, transport, mode):
    async def scenario(world):
        await world.update(0)
        for version in (1, 2):
            # A request of each engine is on its way when the update arrives.
            running = [
                asyncio.ensure_future(
                    engine.generate(request(f"{version}-{mode}", max_tokens=48, policy=world.policy))
                )
                for engine in world.engines
            ]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            manifest = await world.update(version)
            assert manifest.kind == bundle and manifest.transport == world.way.transport
            for done in await asyncio.gather(*running):
                assert np.all(np.diff(done.versions) >= 0)
                assert set(done.versions) <= {version - 1, version}
                if mode == "drain":
                    assert set(done.versions) == {version - 1} and done.finish_reason == "length"
                if mode == "abort":
                    assert done.finish_reason == "abort" and set(done.versions) <= {version - 1}
            await world.check()
        assert world.warnings == []

    in_world(bundle, transport, mode, scenario)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("bundle", "transport"), HERE)
def test_torn_bytes_are_noticed_served_around_and_made_good(in_world, bundle, transport, mode):
    async def scenario(world):
        await world.update(0)
        manifest = await world.sync.publish(1)
        DAMAGE[world.way.transport](world.publisher.sender, manifest)
        served = []
        publish_whole = world.publisher.publish_whole

        async def serve_meanwhile():
            # The trainer is in the middle of a step: until it answers, the old weights are served.
            await world.check(0)
            served.extend(
                [
                    await engine.generate(request("old", max_tokens=4, policy=world.policy))
                    for engine in world.engines
                ]
            )
            return await publish_whole()

        world.publisher.publish_whole = serve_meanwhile
        await world.sync.land(manifest)
        assert [set(done.versions) for done in served] == [{0}] * len(world.engines)
        assert len(world.warnings) == len(world.engines)
        assert "engine-0 keeps its old weights" in world.warnings[0]
        await world.check(1)
        world.publisher.publish_whole = publish_whole
        await world.update(2)
        await world.check(2)

    in_world(bundle, transport, mode, scenario)


@pytest.mark.parametrize(("bundle", "transport"), HERE)
def test_an_engine_that_missed_an_update_catches_up(in_world, bundle, transport):
    async def scenario(world):
        await world.update(0)
        *others, last = world.engines
        await world.update(1, world.sync_of(others, "never"))
        await world.update(2)
        await world.check(2)
        text_of_it = f"{last.name} has version 0 and the delta to 2 builds on 1"
        told = [text for text in world.warnings if text_of_it in text]
        assert len(world.warnings) == len(told) == (1 if bundle == "delta" else 0)
        await world.update(3)
        await world.check(3)

    in_world(bundle, transport, "never", scenario)


@pytest.mark.parametrize(("bundle", "transport"), HERE)
def test_an_engine_joins_late(in_world, checkpoint, bundle, transport):
    async def scenario(world):
        await world.update(0)
        await world.update(1)
        await world.engines[-1].close()
        world.engines[-1] = make_engine(checkpoint, "late", device=world.way.engine, lora=world.lora)
        sync = world.sync_of(world.engines, "never")
        await world.update(2, sync)
        await world.check(2)
        await world.update(3, sync)
        await world.check(3)

    in_world(bundle, transport, "never", scenario)


@pytest.mark.parametrize(("bundle", "transport"), HERE)
def test_an_update_may_come_twice_and_an_older_one_is_refused(in_world, bundle, transport):
    async def scenario(world):
        await world.update(0)
        manifest = await world.sync.publish(1)
        await world.sync.land(manifest)
        assert [await engine.apply(manifest) for engine in world.engines] == [1] * len(world.engines)
        await world.check(1)
        with pytest.raises(WeightSyncError, match="engine-0 has version 1; 0 is older"):
            await world.engines[0].apply(replace(manifest, version=0))
        await world.check(1)

    in_world(bundle, transport, "never", scenario)


@pytest.mark.parametrize(("bundle", "transport"), HERE)
def test_the_trainer_may_be_ahead_when_an_engine_catches_up(in_world, bundle, transport):
    """The update to 1 failed on one engine while step 2 was trained: it gets 2, and the update to 2 finds it there."""

    async def scenario(world):
        await world.update(0)
        first = await world.sync.publish(1)
        DAMAGE[world.way.transport](world.publisher.sender, first)
        world.publisher.advance(2)
        await world.sync.land(first)
        assert world.sync.version == 1
        await world.check(2)
        await world.update(2)
        await world.update(3)
        await world.check(3)

    in_world(bundle, transport, "never", scenario)


@pytest.mark.parametrize(
    ("bundle", "transport", "mode"),
    [
        (bundle, transport, mode)
        for bundle in BUNDLES
        for transport in ("shared_memory", "files", "collective")
        for mode in MODES
        # A broadcast is waited for until its deadline, whatever it carries: one bundle goes through all modes.
        if transport != "collective" or bundle == "full" or mode == "never"
    ]
    + [pytest.param("full", "nccl", mode, id=f"full-nccl-{mode}", marks=ONE_GPU) for mode in MODES],
)
def test_a_sender_that_is_gone_leaves_the_old_weights_serving(in_world, tmp_path, bundle, transport, mode):
    """Twice over: the bundle is not there, and no other one is to be had."""

    async def scenario(world):
        await world.update(0)
        manifest = await world.sync.publish(1)
        world.publisher.sender.close()

        async def no_trainer():
            raise WeightSyncError("the trainer is gone")

        publish_whole, world.publisher.publish_whole = world.publisher.publish_whole, no_trainer
        # A folder is looked at for a while, since it may show a directory late.
        for engine in world.engines if transport == "files" else ():
            engine._receiver._receivers["files"]._visible_s = 0.0
        with pytest.raises(WeightSyncError, match="the trainer is gone"):
            await world.sync.land(manifest)
        await world.check(0)
        done = await world.engines[0].generate(request("after", max_tokens=5, policy=world.policy))
        assert set(done.versions) == {0} and done.finish_reason == "length"
        world.publisher.publish_whole = publish_whole
        world.publisher.sender = sender_for(
            world.way.transport, bundle, tmp_path / "again", num_receivers=len(world.engines)
        )
        await world.update(2)
        await world.check(2)

    in_world(bundle, transport, mode, scenario, deadline_s=3.0)


@pytest.mark.parametrize(("bundle", "transport"), ON_GPUS)
def test_gpus_of_their_own_use_nccl(in_world, bundle, transport):
    """Save for differences, which are made on the host and are small."""

    async def scenario(world):
        groups = set()
        for version in (0, 1, 2):
            manifest = await world.update(version)
            groups.add(world.engines[0]._receiver._receivers["collective"]._group)
        await world.check(2)
        assert manifest.kind == bundle
        assert {group.backend for group in groups} == ({"nccl", "gloo"} if bundle == "delta" else {"nccl"})

    in_world(bundle, transport, "never", scenario)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the weights are on a GPU")
@pytest.mark.parametrize("bundle", BUNDLES)
@pytest.mark.parametrize("transport", ["shared_memory-one_gpu", "files-one_gpu", "collective-one_gpu"])
def test_weights_of_a_gpu_go_through_the_host(in_world, bundle, transport):
    """Where trainer and engines share one GPU, or have none in common. One update lands, one is torn and made good."""

    async def scenario(world):
        for version in (0, 1):
            assert (await world.update(version)).kind == (
                "full" if (bundle, version) == ("delta", 0) else bundle
            )
            await world.check(version)
        manifest = await world.sync.publish(2)
        DAMAGE[world.way.transport](world.publisher.sender, manifest)
        await world.sync.land(manifest)
        assert len(world.warnings) == len(world.engines)
        await world.check(2)
        await world.update(3)
        await world.check(3)

    in_world(bundle, transport, "never", scenario)


@pytest.mark.parametrize("bundle", ["full", "delta"])
def test_experts_travel_under_the_names_of_the_checkpoint(tmp_path, bundle):
    """Fused in memory on both sides, taken apart on the way."""

    async def main():
        checkpoint = write_checkpoint(tmp_path / "model", family="qwen3_moe")
        sender = sender_for("files", bundle, tmp_path, num_receivers=2)
        world = World(checkpoint, CheckpointNamed(sender, load_model(checkpoint)), "never")
        for version in (0, 1, 2):
            manifest = await world.update(version)
            names = {slot.name for slot in manifest.slots}
            assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names
            await world.check()
        assert manifest.kind == bundle and world.warnings == []
        await world.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


@pytest.mark.parametrize("transport", ["shared_memory", "files", "collective"])
def test_adapters_of_experts_are_held_to_the_same(tmp_path, transport):
    """Updates land as published, and a damaged one leaves the old one serving until it is sent again."""

    async def main():
        checkpoint = write_checkpoint(tmp_path / "model", family="qwen3_moe")
        sender = sender_for(transport, "adapter", tmp_path, num_receivers=2)
        world = World(checkpoint, sender, "never", bundle="adapter", lora=EXPERT_LORA)
        publish_whole = world.publisher.publish_whole

        async def check_meanwhile():
            await world.check(1)
            return await publish_whole()

        for version in (0, 1):
            manifest = await world.update(version)
            await world.check(version)
        names = {slot.name for slot in manifest.slots}
        assert "model.layers.0.mlp.experts.gate_up_proj.lora_A.weight" in names and world.warnings == []
        manifest = await world.sync.publish(2)
        DAMAGE[transport](sender, manifest)
        world.publisher.publish_whole = check_meanwhile
        await world.sync.land(manifest)
        assert len(world.warnings) == 2 and "keeps its old weights" in world.warnings[0]
        await world.check(2)
        await world.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


def test_an_engine_that_fails_twice_ends_the_update(in_world):
    async def scenario(world):
        await world.update(0)
        manifest = await world.sync.publish(1)
        publish_whole = world.publisher.publish_whole

        async def torn():
            whole = await publish_whole()
            DAMAGE["shared_memory"](world.publisher.sender, whole)
            return whole

        world.publisher.publish_whole = torn
        DAMAGE["shared_memory"](world.publisher.sender, manifest)
        with pytest.raises(WeightSyncError, match="does not match its digest"):
            await world.sync.land(manifest)
        await world.check(0)

    in_world("delta", "shared_memory", "block", scenario)


def test_an_adapter_is_refused_where_there_is_no_room_for_one(in_world):
    async def scenario(world):
        await world.update(0)
        manifest = await world.sync.publish(1)
        with pytest.raises(WeightSyncError, match="engine-0 serves no adapters"):
            await world.engines[0].apply(replace(manifest, kind="adapter"))
        await world.check(0)

    in_world("full", "shared_memory", "never", scenario)
