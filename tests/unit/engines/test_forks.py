"""Branches that leave a finished request: same tokens as a fresh prefill, one version, no block lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.engines.holds import Holds
from headrace.engines.kv_cache import BlockPool
from headrace.engines.make import torch_engine
from headrace.errors import ForkError
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.tensors import to_blobs
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import ForkPoint

PROMPT, SAMPLED, BRANCHES = 30, 60, 4


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    directory = tmp_path_factory.mktemp("other")
    return make_tiny_model(
        directory, vocab_size=61, init_std=0.12, tie_embeddings=False, context_tokens=256, seed=1
    )


@pytest.fixture
def make_root(make_request):
    def build(name="root", hold_s=60.0):
        return replace(make_request(name, prompt=PROMPT, max_tokens=SAMPLED), hold_s=hold_s)

    return build


def branches(root, completion, pivot, *, version=0, num=BRANCHES, max_tokens=25, name="b"):
    """Requests that leave the root after ``pivot`` of its sampled tokens."""
    prompt = np.concatenate([root.prompt_ids, completion.token_ids[:pivot]])
    fork = ForkPoint(request_id=root.id, num_tokens=len(prompt), version=version)
    sampling = replace(root.sampling, max_tokens=max_tokens)
    plain = replace(root, hold_s=0.0, prompt_ids=prompt, sampling=sampling)
    return [replace(plain, id=f"{name}{i}", seed=100 + i, fork=fork) for i in range(num)]


@pytest.mark.parametrize("device", ["plain", "device"])
@pytest.mark.parametrize("pivot", [1, 18, 33, 51, 59])
def test_a_branch_samples_what_a_fresh_prefill_does(
    make_engine, make_device_engine, make_root, run_engine, device, pivot
):
    make = make_engine if device == "plain" else make_device_engine
    engine, root = make(), make_root()
    completion = run_engine(engine, root)["root"]
    before = engine.counters()["prefill_tokens"]
    family = branches(root, completion, pivot)
    forked = run_engine(engine, *family)
    fresh = run_engine(make(), *[replace(r, fork=None) for r in family])
    for name, expected in fresh.items():
        np.testing.assert_array_equal(forked[name].token_ids, expected.token_ids)
        np.testing.assert_allclose(forked[name].logprobs, expected.logprobs, atol=1e-5, rtol=0)
    counters = engine.counters()
    # The token at the pivot is computed again, for its logits, whatever is found.
    num_shared = min((PROMPT + pivot) // 16 * 16, PROMPT + pivot - 1)
    assert counters["forks"] == BRANCHES and counters["forked_tokens"] == BRANCHES * num_shared
    # The rest of the block in which the pivot lies is computed again: less than a block and the last token.
    assert counters["prefill_tokens"] - before == BRANCHES * (PROMPT + pivot - num_shared)


def test_a_block_that_the_last_tokens_fill_is_held_too(make_engine, make_request, run_engine):
    """Otherwise it would be found only if the request had gone on."""
    engine = make_engine()
    root = replace(make_request("root", prompt=16, max_tokens=17), hold_s=60.0)
    completion = run_engine(engine, root)["root"]
    run_engine(engine, *branches(root, completion, 17, num=1))
    assert engine.counters()["forked_tokens"] == 32


def test_a_fork_after_an_update_is_computed_with_the_new_weights(
    make_engine, make_root, run_engine, other_weights, same_bits
):
    engine, root = make_engine(), make_root()
    completion = run_engine(engine, root)["root"]
    engine.apply(1, to_blobs(other_weights))
    assert engine.counters()["holds"] == 0
    family = branches(root, completion, 40)
    forked = run_engine(engine, *family)
    fresh = make_engine()
    fresh.apply(1, to_blobs(other_weights))
    expected = run_engine(fresh, *[replace(r, fork=None) for r in family])
    assert all(same_bits(forked[r.id], expected[r.id]) for r in family)
    assert all(c.kv_versions[:, 0].tolist() == [1] for c in forked.values())
    assert engine.counters()["forks_stale"] == BRANCHES and engine.counters()["forked_tokens"] == 0


def test_a_request_that_ran_across_an_update_is_not_held(make_engine, make_root, other_weights):
    engine = make_engine()
    engine.submit(make_root())
    for _ in range(20):
        engine.step()
    engine.apply(1, to_blobs(other_weights))
    while engine.has_work:
        engine.step()
    assert engine.counters()["holds"] == 0


def test_a_fork_at_freed_blocks_is_counted_and_computed_again(make_engine, make_root, run_engine, same_bits):
    engine, root = make_engine(), make_root()
    completion = run_engine(engine, root)["root"]
    engine.release(["root", "unknown"])
    family = branches(root, completion, 40)
    forked = run_engine(engine, *family)
    expected = run_engine(make_engine(), *[replace(r, fork=None) for r in family])
    assert all(same_bits(forked[r.id], expected[r.id]) for r in family)
    assert engine.counters()["forks_freed"] == BRANCHES


def test_a_fork_that_continues_something_else_is_refused_alone(make_engine, make_root, run_engine):
    engine, root = make_engine(), make_root()
    completion = run_engine(engine, root)["root"]
    good = branches(root, completion, 40, num=1)[0]
    other = good.prompt_ids.copy()
    other[3] = (other[3] + 1) % 61
    with pytest.raises(ForkError, match="first 70 tokens of 'root'"):
        engine.submit(replace(good, prompt_ids=other))
    with pytest.raises(ForkError, match="after 70 tokens, but its prompt has 50"):
        engine.submit(replace(good, prompt_ids=good.prompt_ids[:50]))
    assert run_engine(engine, good)["b0"].num_tokens == 25


def test_holds_are_given_up_before_anybody_is_sent_back(make_engine, make_root, run_engine, make_request):
    engine = make_engine(kv_tokens=256)
    run_engine(engine, make_root("old"), make_root("new"))
    assert engine.counters()["holds"] == 2
    run_engine(engine, make_request("long", prompt=40, max_tokens=130))
    counters = engine.counters()
    assert (counters["holds"], counters["holds_given_up"], counters["preemptions"]) == (1, 1, 0)
    assert counters["free_blocks"] == 256 // 16


def test_a_hold_ends_at_its_deadline(tiny_checkpoint, make_root, run_engine, make_request):
    now = 0.0
    ledger = TimeLedger(ENGINE_ACTIVITIES, clock=lambda: now)
    engine = torch_engine(load_model(tiny_checkpoint), ledger=ledger)
    run_engine(engine, make_root("short", 5.0), make_root("long", 50.0))
    now = 6.0
    run_engine(engine, make_request("any"))
    assert engine.counters()["holds"] == 1 and engine.counters()["holds_expired"] == 1


def test_siblings_wait_for_one_another_and_start_under_one_version(
    make_engine, make_root, run_engine, make_request, other_weights
):
    engine, root = make_engine(max_running=BRANCHES), make_root()
    completion = run_engine(engine, root)["root"]
    done = {}
    engine.submit(make_request("other", max_tokens=40))
    engine.step()
    for request in branches(root, completion, 40):
        engine.submit(request)
    for _ in range(5):
        engine.step()
    # There are slots for all but one, and none has started.
    assert engine.started_ids() == ["other"]
    engine.apply(1, to_blobs(other_weights))
    while engine.has_work:
        done.update(engine.step())
    assert {int(done[f"b{i}"].versions[0]) for i in range(BRANCHES)} == {1}


def test_a_family_larger_than_the_engine_still_runs(make_engine, make_root, run_engine):
    engine, root = make_engine(max_running=2), make_root()
    completion = run_engine(engine, root)["root"]
    assert len(run_engine(engine, *branches(root, completion, 40, num=5))) == 5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=80))
def test_with_pins_every_block_is_in_exactly_one_place(actions):
    """Against a plain model: a block can be given unless somebody uses it, and a pinned one stays findable until
    nothing else is left."""
    now, pool, used, version = 0.0, BlockPool(6), [], 0
    holds = Holds(pool, lambda: now)
    for number, (action, pick) in enumerate(actions):
        if action == 0:
            block = pool.allocate(version)
            assert (block is None) == (len(set(used)) == pool.capacity)
            used += [] if block is None else [block]
        elif action == 1 and used:
            pool.release([used.pop(pick % len(used))])
        elif action == 2 and used:
            pool.publish(used[pick % len(used)], bytes([pick]), version)
        elif action == 3:
            used += pool.share([bytes([pick])])
        elif action == 4:
            holds.forget(0)
            pool.forget()
            version += 1
        elif action == 5:
            request = _Held(f"r{number}", hold_s=float(pick))
            holds.add(request, np.zeros(0, np.int32), [bytes([pick]), bytes([pick + 1])], 0)
        else:
            now += 1.0
            holds.expire()
        assert pool.num_free + len(set(used)) == pool.capacity
        assert all(pool.is_findable(block) for hold in holds._held.values() for block in hold.blocks)
    holds.release(list(holds._held))
    pool.release(used)
    assert pool.num_free == pool.capacity


class _Held:
    def __init__(self, name, hold_s):
        self.id, self.hold_s = name, hold_s


def test_a_request_that_ends_again_is_held_once():
    """As after a resumption, under the same id. Pins that nobody takes back would keep the block from everybody."""
    pool, nothing = BlockPool(2), np.zeros(0, np.int32)
    holds, block = Holds(pool, lambda: 0.0), pool.allocate(0)
    pool.publish(block, b"a", 0)
    pool.release([block])
    for _ in range(2):
        holds.add(_Held("r", hold_s=1.0), nothing, [b"a"], 0)
    holds.release(["r"])
    assert len(holds) == 0 and pool.allocate(0) == block


def test_an_update_of_one_adapter_leaves_the_holds_of_others():
    pool, nothing = BlockPool(3), np.zeros(0, np.int32)
    holds = Holds(pool, lambda: 0.0)
    for adapter, name in enumerate(("base", "other")):
        holds.add(_Held(name, hold_s=1.0), nothing, [], adapter)
    holds.forget(1)
    assert "base" in holds and "other" not in holds


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_blocks_are_conserved_through_holds_forks_aborts_and_preemption(
    make_engine, make_root, other_weights, data
):
    engine = make_engine(kv_tokens=192, max_running=6)
    everything, finished, version = engine.counters()["free_blocks"], {}, 0
    roots, live = {}, set()
    for number in range(data.draw(st.integers(4, 14))):
        move = data.draw(st.sampled_from(["root", "fork", "abort", "release", "update", "steps"]))
        if move == "root":
            root = make_root(f"root{number}")
            roots[root.id] = (root, version)
            engine.submit(root)
            live.add(root.id)
        elif move == "fork" and (ready := sorted(finished.keys() & roots.keys())):
            root, begun = roots[data.draw(st.sampled_from(ready))]
            completion, pivot = finished[root.id], data.draw(st.integers(1, SAMPLED))
            for request in branches(root, completion, pivot, version=begun, num=3, name=f"b{number}-"):
                engine.submit(request)
                live.add(request.id)
        elif move == "abort" and live:
            engine.abort([data.draw(st.sampled_from(sorted(live)))])
        elif move == "release" and roots:
            engine.release([data.draw(st.sampled_from(sorted(roots)))])
        elif move == "update":
            version += 1
            engine.apply(version, to_blobs(other_weights))
        for _ in range(data.draw(st.integers(0, 40))):
            if engine.has_work:
                finished.update(engine.step())
        live -= finished.keys()
    while engine.has_work:
        finished.update(engine.step())
    assert engine.counters()["free_blocks"] == everything
    engine.release(list(roots))
    assert engine.counters()["holds"] == 0 and engine.counters()["free_blocks"] == everything
