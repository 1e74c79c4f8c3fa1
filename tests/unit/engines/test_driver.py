"""The engine on an event loop: futures, progress, the four interrupt modes, and failure."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace

import numpy as np
import pytest

from headrace.engines.driver import EngineDriver, Pace
from headrace.engines.make import torch_engine
from headrace.engines.torch_engine import TorchEngine
from headrace.errors import RoleError, TaskError, WeightSyncError
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.tensors import to_blobs
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import WeightManifest

WAIT_S = 30.0


class MemoryReceiver:
    """Hands out bundles kept in a dict by version."""

    def __init__(self):
        self.bundles = {}
        self.closed = False

    def receive(self, manifest, base=()):
        yield from self.bundles[manifest.version]

    def close(self):
        self.closed = True


def manifest(version):
    return WeightManifest(
        version=version, base_version=None, kind="full", transport="memory", location="", num_bytes=0, digest="",
        slots=(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def new_blobs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("new")
    model = make_tiny_model(
        directory, vocab_size=61, init_std=0.12, tie_embeddings=False, context_tokens=256, seed=1
    )
    return list(to_blobs(model))


@pytest.fixture
def driver(tiny_checkpoint, new_blobs):
    ledger = TimeLedger(ENGINE_ACTIVITIES)
    core = torch_engine(load_model(tiny_checkpoint), ledger=ledger)
    receiver = MemoryReceiver()
    receiver.bundles = {1: new_blobs, 2: new_blobs[:-1]}
    return EngineDriver(core, receiver, ledger=ledger, progress_tokens=8)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_S))


async def start(driver, *requests, passes=5):
    """Start requests and let a few passes happen."""
    tasks = [asyncio.ensure_future(driver.generate(request)) for request in requests]
    for _ in range(passes):
        await asyncio.sleep(0)
    return tasks


def test_many_requests_finish_and_report_progress(driver, make_request):
    async def main():
        seen = []
        others = [driver.generate(make_request(i, max_tokens=10 + i)) for i in range(5)]
        got, *rest = await asyncio.gather(
            driver.generate(make_request("a", max_tokens=30), on_progress=seen.append), *others
        )
        assert got.num_tokens == 30 and [c.num_tokens for c in rest] == [10, 11, 12, 13, 14]
        assert [c.num_tokens for c in seen] == [8, 16, 24]
        assert all(c.finish_reason == "abort" for c in seen)
        np.testing.assert_array_equal(seen[-1].token_ids, got.token_ids[:24])
        status = await driver.status()
        assert status.counters["generated_tokens"] == 90 and status.counters["running"] == 0
        await driver.close()

    run(main())


def test_reports_keep_the_pace_and_completions_do_not_wait_for_it(driver, make_request):
    now = [0.0]
    driver._pace = Pace(10.0, clock=lambda: now[0])
    seen = []

    async def main():
        requests = [make_request(str(i), max_tokens=80) for i in range(4)]
        tasks = [asyncio.ensure_future(driver.generate(r, seen.append)) for r in requests]
        while not driver._core.num_started:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        told = len(seen)
        now[0] += 0.3
        for _ in range(20):
            await asyncio.sleep(0)
        assert (told, len(seen)) == (0, 3)
        return await asyncio.gather(*tasks)

    assert [completion.num_tokens for completion in run(main())] == [80] * 4
    assert len(seen) == 3


def test_what_a_pace_allows_is_lost_after_a_second():
    now = [0.0]
    pace = Pace(100.0, clock=lambda: now[0])
    assert pace.allowed() == 0
    now[0] = 0.25
    assert pace.allowed() == 25
    pace.spend(20)
    assert pace.allowed() == 5
    now[0] = 50.0
    assert pace.allowed() == 100
    assert Pace(math.inf).allowed() is None


def test_a_bad_request_fails_alone(driver, make_request):
    async def main():
        good = asyncio.ensure_future(driver.generate(make_request("good")))
        with pytest.raises(TaskError):
            await driver.generate(make_request("bad", prompt=400))
        assert (await good).num_tokens == 20
        await driver.close()

    run(main())


def test_tokens_that_the_model_does_not_know_are_refused(driver, make_request):
    async def main():
        good = asyncio.ensure_future(driver.generate(make_request("good")))
        for wrong in (61, -1):
            with pytest.raises(
                TaskError, match=rf"'bad' has token {wrong}, and the model knows 0 to 60; use the tok"
            ):
                await driver.generate(make_request("bad", prompt=np.array([1, wrong, 2])))
            with pytest.raises(TaskError, match=f"to be scored has token {wrong}"):
                await driver.score([np.array([1, 2, wrong])])
        prefix = replace(await driver.generate(make_request("first", max_tokens=3)), finish_reason="abort")
        prefix.token_ids[1] = 99
        with pytest.raises(TaskError, match="the prefix of request 'next' has token 99"):
            await driver.generate(replace(make_request("next"), prefix=prefix))
        assert (await good).num_tokens == 20
        await driver.close()

    run(main())


def test_a_callback_that_raises_ends_its_own_request(driver, make_request):
    def refuse(_completion):
        raise ValueError("nobody listens")

    async def main():
        good = asyncio.ensure_future(driver.generate(make_request("good", max_tokens=30)))
        with pytest.raises(ValueError, match="nobody listens"):
            await driver.generate(make_request("told", max_tokens=200), on_progress=refuse)
        assert (await good).num_tokens == 30
        assert driver._core.counters()["running"] == 0
        await driver.close()

    run(main())


def test_abort_returns_what_was_sampled(driver, make_request):
    async def main():
        a, b = await start(driver, make_request("a", max_tokens=100), make_request("b"))
        await driver.abort(["a", "unknown"])
        part = await a
        assert part.finish_reason == "abort" and 0 < part.num_tokens < 100
        assert (await b).num_tokens == 20
        await driver.close()

    run(main())


def test_a_cancelled_caller_leaves_nothing_behind(driver, make_request):
    async def main():
        (task,) = await start(driver, make_request("a", max_tokens=100))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await driver.status()).counters["running"] == 0
        assert (await driver.generate(make_request("a"))).num_tokens == 20
        await driver.close()

    run(main())


def test_never_swaps_between_two_passes(driver, make_request, monkeypatch):
    step, passes = driver._core.step, []

    def step_until_the_update():
        """The update is read beside the passes: at most twenty of them come before it, the rest after."""
        if len(passes) == 20 and driver._core.version == 0:
            return []
        passes.append(driver._core.version)
        return step()

    monkeypatch.setattr(driver._core, "step", step_until_the_update)

    async def main():
        (task,) = await start(driver, make_request("a", max_tokens=40))
        await driver.begin_update("never")
        await asyncio.sleep(0)
        assert await driver.apply(manifest(1)) == 1
        got = await task
        assert got.versions.tolist() == passes and set(passes) == {0, 1} and passes == sorted(passes)
        await driver.close()

    run(main())


def test_unthreaded_an_update_lands_at_once(driver, make_request):
    """So that one process alone repeats itself: the pass an update follows is the same in every run."""

    async def main():
        (task,) = await start(driver, make_request("a", max_tokens=40), passes=9)
        with pytest.raises(StopIteration):
            driver.apply(manifest(1)).send(None)
        assert driver._core.version == 1
        await task
        await driver.close()

    run(main())


def test_requests_go_on_while_an_update_is_read(driver, make_request, monkeypatch):
    """Reading and verifying a bundle takes long and needs nothing of the engine."""
    driver._threaded = True
    read, receive = threading.Event(), driver._receiver.receive

    def receive_late(told, base):
        assert read.wait(WAIT_S), "the engine stood still while the update was read"
        return receive(told, base)

    monkeypatch.setattr(driver._receiver, "receive", receive_late)

    async def scenario():
        update = asyncio.create_task(driver.apply(manifest(1)))
        await asyncio.sleep(0)
        done = await driver.generate(make_request("a", max_tokens=12))
        assert not update.done()
        read.set()
        assert await update == 1
        await driver.close()
        return done

    assert run(scenario()).versions.tolist() == [0] * 12


def test_an_update_that_was_given_up_on_is_read_to_its_end_first(driver):
    """No two are read at once, and the receiver is closed behind them."""
    driver._threaded = True
    receiver, begun, go_on, events = driver._receiver, threading.Event(), threading.Event(), []

    def receive(manifest, base=()):
        events.append("begin")
        begun.set()
        assert go_on.wait(WAIT_S)
        events.append("end")
        return receiver.bundles[1]

    receiver.receive, receiver.close = receive, lambda: events.append("close")

    async def main():
        first = asyncio.ensure_future(driver.apply(manifest(1)))
        await asyncio.to_thread(begun.wait, WAIT_S)
        first.cancel()
        second = asyncio.ensure_future(driver.apply(manifest(1)))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(driver.close())
        await asyncio.sleep(0)
        assert not closing.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(RoleError, match="is closed"):
            await second
        await closing

    run(main())
    assert events == ["begin", "end", "close"]


def test_block_freezes_until_applied(driver, make_request):
    async def main():
        (task,) = await start(driver, make_request("a", max_tokens=40))
        await driver.begin_update("block")
        frozen = (await driver.status()).progress
        late = asyncio.ensure_future(driver.generate(make_request("late")))
        for _ in range(20):
            await asyncio.sleep(0)
        assert (await driver.status()).progress == frozen
        await driver.apply(manifest(1))
        got, other = await asyncio.gather(task, late)
        assert set(got.versions) == {0, 1} and set(other.versions) == {1}
        assert got.kv_versions[0, 0] == 0 and got.kv_versions[-1, 0] == 1
        assert (await driver.status()).seconds["paused-for-weights"] > 0
        await driver.close()

    run(main())


def test_drain_finishes_what_runs_and_starts_nothing(driver, make_request):
    async def main():
        (task,) = await start(driver, make_request("a", max_tokens=40))
        update = asyncio.ensure_future(driver.begin_update("drain"))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(driver.generate(make_request("late")))
        await update
        assert task.done() or (await driver.status()).counters["running"] == 0
        assert not late.done()
        await driver.apply(manifest(1))
        got, other = await asyncio.gather(task, late)
        assert set(got.versions) == {0} and set(other.versions) == {1}
        await driver.close()

    run(main())


def test_a_drain_ends_when_the_last_caller_gives_up(driver, make_request):
    async def main():
        (task,) = await start(driver, make_request("a", max_tokens=200))
        draining = asyncio.ensure_future(driver.begin_update("drain"))
        await asyncio.sleep(0)
        assert not draining.done()
        task.cancel()
        await draining
        await driver.close()

    run(main())


def test_a_drain_ends_when_the_last_request_is_aborted(driver, make_request):
    async def main():
        (task,) = await start(driver, make_request("a", max_tokens=200))
        draining = asyncio.ensure_future(driver.begin_update("drain"))
        await asyncio.sleep(0)
        assert not draining.done()
        await driver.abort(["a"])
        await draining
        assert (await task).finish_reason == "abort"
        await driver.close()

    run(main())


def test_every_drain_waits_for_what_runs(driver, make_request):
    """Also one that comes after a moment in which nothing ran."""

    async def main():
        await driver.generate(make_request("before", max_tokens=2))
        (task,) = await start(driver, make_request("a", max_tokens=40))
        await driver.begin_update("drain")
        assert (await driver.status()).counters["running"] == 0
        await driver.apply(manifest(1))
        assert set((await task).versions) == {0}
        await driver.close()

    run(main())


def test_a_drain_waits_for_what_was_sent_back_too(tiny_checkpoint, new_blobs, make_request):
    ledger = TimeLedger(ENGINE_ACTIVITIES)
    core, receiver = torch_engine(load_model(tiny_checkpoint), ledger=ledger, kv_tokens=96), MemoryReceiver()
    driver, receiver.bundles = EngineDriver(core, receiver, ledger=ledger), {1: new_blobs}

    async def main():
        tasks = await start(driver, *[make_request(name, prompt=33, max_tokens=40) for name in "ab"])
        while not core.counters()["preemptions"]:
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        await driver.begin_update("drain")
        await driver.apply(manifest(1))
        assert [set(done.versions) for done in await asyncio.gather(*tasks)] == [{0}, {0}]
        await driver.close()

    run(main())


def test_a_failing_step_ends_a_drain(driver, make_request, monkeypatch):
    def broken(self):
        raise RuntimeError("no more memory")

    async def main():
        (task,) = await start(driver, make_request("a", max_tokens=200))
        draining = asyncio.ensure_future(driver.begin_update("drain"))
        await asyncio.sleep(0)
        monkeypatch.setattr(TorchEngine, "step", broken)
        with pytest.raises(RoleError, match="no more memory"):
            await draining
        with pytest.raises(RuntimeError, match="no more memory"):
            await task
        await driver.close()

    run(main())


def test_close_hands_out_what_had_ended_before(driver, make_request):
    async def main():
        done = replace(await driver.generate(make_request("a", max_tokens=5)), finish_reason="abort")
        await driver.begin_update("block")
        resumed = asyncio.ensure_future(
            driver.generate(replace(make_request("a", max_tokens=5), prefix=done))
        )
        await asyncio.sleep(0)
        await driver.close()
        assert (await resumed).finish_reason == "length"

    run(main())


def test_close_ends_a_drain(driver, make_request):
    async def main():
        (task,) = await start(driver, make_request("a", max_tokens=200))
        draining = asyncio.ensure_future(driver.begin_update("drain"))
        await asyncio.sleep(0)
        await driver.close()
        with pytest.raises(RoleError, match="is closed"):
            await draining
        assert (await task).finish_reason == "abort"

    run(main())


def test_abort_mode_returns_partials_and_holds_newcomers(driver, make_request):
    async def main():
        (task,) = await start(driver, make_request("a", max_tokens=40))
        await driver.begin_update("abort")
        part = await task
        assert part.finish_reason == "abort" and part.num_tokens > 0
        resumed = asyncio.ensure_future(driver.generate(make_request("a", max_tokens=40, prefix=part)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not resumed.done()
        await driver.apply(manifest(1))
        got = await resumed
        np.testing.assert_array_equal(got.versions, [0] * part.num_tokens + [1] * (40 - part.num_tokens))
        np.testing.assert_array_equal(got.kv_versions, [[1, 12 + 39]])
        await driver.close()

    run(main())


@pytest.mark.parametrize("mode", ["block", "drain", "abort"])
def test_a_failed_update_keeps_the_old_weights_and_can_be_cancelled(driver, make_request, mode):
    async def main():
        await driver.begin_update(mode)
        waiting = asyncio.ensure_future(driver.generate(make_request("a")))
        await asyncio.sleep(0)
        with pytest.raises(WeightSyncError):
            await driver.apply(manifest(2))
        assert not waiting.done() and (await driver.status()).version == 0
        await driver.cancel_update()
        assert set((await waiting).versions) == {0}
        await driver.close()

    run(main())


def test_all_weights_of_the_version_it_has_are_taken_anew(driver, new_blobs, make_request):
    """An engine starts with a version's number, and not always with its weights."""
    driver._receiver.bundles[0] = new_blobs

    async def main():
        ids = [np.arange(20)]
        (before,) = await driver.score(ids)
        assert await driver.apply(manifest(0)) == 0
        (renewed,) = await driver.score(ids)
        assert await driver.apply(manifest(1)) == 1
        (after,) = await driver.score(ids)
        assert not np.array_equal(before, renewed)
        np.testing.assert_array_equal(renewed, after)
        await driver.close()

    run(main())


def test_a_delta_that_has_landed_already_ends_the_pause(driver, make_request):
    async def main():
        await driver.begin_update("block")
        waiting = asyncio.ensure_future(driver.generate(make_request("a")))
        delta = replace(manifest(0), kind="delta", base_version=-1)
        assert await driver.apply(delta) == 0
        assert (await waiting).num_tokens == 20
        await driver.close()

    run(main())


def test_a_failing_step_reaches_every_waiter(driver, make_request, monkeypatch):
    def broken(self):
        raise RuntimeError("no more memory")

    async def main():
        tasks = [asyncio.ensure_future(driver.generate(make_request(i))) for i in range(3)]
        monkeypatch.setattr(TorchEngine, "step", broken)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(r) for r in results] == ["no more memory"] * 3
        with pytest.raises(RoleError, match="no more memory"):
            await driver.generate(make_request("later"))
        await driver.close()

    run(main())


def test_close_returns_partials_and_refuses_more(driver, make_request):
    async def main():
        (task,) = await start(driver, make_request("a", max_tokens=100))
        await driver.close()
        await driver.close()
        assert (await task).finish_reason == "abort"
        assert driver._receiver.closed
        with pytest.raises(RoleError, match="closed"):
            await driver.generate(make_request("b"))

    run(main())


def test_seconds_add_up_to_the_age(tiny_checkpoint, make_request):
    ticks = iter(range(10**6))
    ledger = TimeLedger(ENGINE_ACTIVITIES, clock=lambda: float(next(ticks)))
    driver = EngineDriver(
        torch_engine(load_model(tiny_checkpoint), ledger=ledger), MemoryReceiver(), ledger=ledger
    )

    async def main():
        await driver.generate(make_request("a"))
        await driver.begin_update("block")
        await driver.cancel_update()
        await driver.generate(make_request("b"))
        seconds = (await driver.status()).seconds
        assert sum(seconds.values()) == next(ticks) - 1
        assert all(seconds[name] > 0 for name in ENGINE_ACTIVITIES)
        await driver.close()

    run(main())


def test_an_update_is_answered_when_its_bytes_have_been_copied(driver, make_request, monkeypatch):
    """A GPU copies later than it is told to, and after the answer the sender writes over what it sent."""
    driver._threaded = True
    copied = threading.Event()

    def wait():
        assert copied.wait(WAIT_S), "the engine stood still while weights were copied"

    monkeypatch.setattr(driver._core, "wait_until_copied", wait, raising=False)

    async def scenario():
        update = asyncio.create_task(driver.apply(manifest(1)))
        while driver._core.version == 0:
            await asyncio.sleep(0)
        done = await driver.generate(make_request("a", max_tokens=12))
        assert not update.done()
        copied.set()
        assert await update == 1
        await driver.close()
        return done

    assert run(scenario()).versions.tolist() == [1] * 12
