"""New requests begin several at a time beside decoding ones, where prompts are a pass of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.gathering import Gathering
from headrace.types import ForkPoint

SLOTS, PASSES = 64, 32
"""Nobody waits for more passes than this."""


@pytest.fixture
def make_full(make_device_engine):
    def build(**settings):
        given = {"max_running": SLOTS, "kv_tokens": SLOTS * 96, "prefill_tokens": 1024, **settings}
        return make_device_engine(**given)

    return build


def starts(engine, num_passes):
    """How many requests begin in each pass."""
    counts, known = [], set(engine.started_ids())
    for _ in range(num_passes):
        engine.step()
        counts.append(len(set(engine.started_ids()) - known))
        known |= set(engine.started_ids())
    return counts


def submit_uneven(engine, make_request, num_uneven):
    """Fills the engine with requests of which one ends in every pass from the eighth on, and more that wait."""
    for i in range(SLOTS):
        engine.submit(make_request(f"first-{i}", max_tokens=8 + i if i < num_uneven else 90))
    for i in range(num_uneven):
        engine.submit(make_request(f"next-{i}", max_tokens=60))


def test_slots_that_come_free_one_by_one_are_filled_together(make_full, make_request):
    engine = make_full()
    submit_uneven(engine, make_request, 24)
    # With three slots free a fourth sequence is in its last pass and 60 go on: one more is waited for.
    assert [count for count in starts(engine, 36) if count] == [SLOTS, 4, 4, 4, 4, 4, 4]


def test_where_prompts_are_computed_beside_decoding_rows_nobody_waits(make_engine, make_request):
    engine = make_engine(max_running=SLOTS, kv_tokens=SLOTS * 96, prefill_tokens=1024)
    submit_uneven(engine, make_request, 24)
    assert [count for count in starts(engine, 40) if count] == [SLOTS] + [1] * 24


def test_a_request_is_put_off_for_so_many_passes_at_most(make_full, make_request):
    engine = make_full()
    engine.submit(make_request("short", max_tokens=5))
    for i in range(SLOTS - 1):
        engine.submit(make_request(f"long-{i}", max_tokens=80))
    engine.submit(make_request("next", max_tokens=5))
    counts = starts(engine, PASSES + 1)
    assert counts == [SLOTS] + [0] * (PASSES - 1) + [1]


def test_requests_far_apart_begin_at_once(make_full, make_request):
    engine = make_full()
    for i in range(SLOTS // 2):
        engine.submit(make_request(f"long-{i}", max_tokens=80))
    starts(engine, PASSES + 4)
    engine.submit(make_request("next", max_tokens=5))
    assert starts(engine, 1) == [1]


def test_with_few_others_a_request_begins_at_once(make_full, make_request):
    engine = make_full()
    for i in range(8):
        engine.submit(make_request(f"long-{i}", max_tokens=80))
    starts(engine, 2)
    engine.submit(make_request("next", max_tokens=5))
    assert starts(engine, 1) == [1]


def test_those_that_one_pass_has_no_room_for_begin_in_the_next(make_full, make_request):
    engine = make_full(prefill_tokens=24)
    for i in range(32):
        engine.submit(make_request(f"long-{i}", prompt=2, max_tokens=80))
    starts(engine, 4)
    for i in range(8):
        engine.submit(make_request(f"next-{i}", prompt=12, max_tokens=5))
    assert starts(engine, 5) == [2, 2, 2, 2, 0]


def test_what_was_sent_back_is_gathered_too(make_full, make_request):
    engine = make_full()
    for i in range(SLOTS // 2):
        engine.submit(make_request(f"long-{i}", max_tokens=80))
    starts(engine, 4)
    scheduler = engine._scheduler
    scheduler.preempt(scheduler.running[-1])
    waits = 0
    while scheduler.waiting:
        engine.step()
        waits += 1
    # The requests began in the first of the four passes.
    assert waits == PASSES - 3


def test_where_blocks_are_short_fewer_are_sent_back_and_the_tokens_are_the_same(
    make_full, make_request, run_engine
):
    requests = [make_request(f"r{i}", prompt=5 + i % 30, max_tokens=10 + 7 * i % 53) for i in range(160)]
    found = {}
    for gathers in (False, True):
        engine = make_full(kv_tokens=SLOTS * 40)
        engine._scheduler.gathering.gathers = gathers
        done, counters = run_engine(engine, *requests), engine.counters()
        assert counters["free_blocks"] == SLOTS * 40 // 16 and counters["passes"] > counters["prompt_passes"]
        found[gathers] = done, counters["prompt_passes"], counters["preemptions"]
    (plain, many, often), (gathered, few, seldom) = found[False], found[True]
    assert 3 * few < 2 * many and seldom < often
    assert {name: list(one.token_ids) for name, one in gathered.items()} == {
        name: list(one.token_ids) for name, one in plain.items()
    }


@pytest.mark.parametrize("prompt_tokens", [128, 130])
def test_a_group_needs_the_blocks_of_its_prompt_once(make_full, make_request, prompt_tokens):
    engine = make_full(kv_tokens=(40 + 9 + 8 + 8) * 16)
    for i in range(40):
        engine.submit(make_request(f"long-{i}", prompt=4, max_tokens=8))
    starts(engine, 2)
    # Nine for the prompt, and for each one of its own and one to grow; the whole prompt for each would do for five.
    assert engine.counters()["free_blocks"] == 9 + 8 + 8
    for i in range(8):
        engine.submit(make_request(f"member-{i}", prompt=np.arange(prompt_tokens) % 61, seed=i, max_tokens=4))
    assert starts(engine, 1) == [8]


def test_branches_are_not_gathered(make_full, make_request):
    engine = make_full()
    root = replace(make_request("root", prompt=20, max_tokens=6), hold_s=60.0)
    engine.submit(root)
    for i in range(SLOTS - 1):
        engine.submit(make_request(f"long-{i}", max_tokens=60))
    done = {}
    while "root" not in done:
        done.update(engine.step())
    prompt = np.concatenate([root.prompt_ids, done["root"].token_ids[:3]])
    fork = ForkPoint(request_id="root", num_tokens=len(prompt), version=0)
    engine.submit(replace(root, id="branch", prompt_ids=prompt, hold_s=0.0, fork=fork))
    assert starts(engine, 1) == [1]


def test_what_was_sent_back_returns_at_once_while_nothing_new_may_start(make_full, make_request):
    engine = make_full()
    for i in range(SLOTS // 2):
        engine.submit(make_request(f"long-{i}", max_tokens=80))
    starts(engine, 4)
    engine.hold(True)
    scheduler = engine._scheduler
    scheduler.preempt(scheduler.running[-1])
    engine.step()
    assert not scheduler.waiting


@given(st.lists(st.tuples(st.integers(65, 128), st.integers(1, 4)), min_size=3 * PASSES, max_size=4 * PASSES))
def test_nobody_is_put_off_for_longer(passes):
    """With somebody ready in every pass, but never enough: some begin in one of any 32."""
    gathering, waited, num_begun = Gathering(gathers=True), 0, 0
    for num_decoding, num_ready in passes:
        gathering.is_open = num_ready >= gathering.next_pass(num_decoding)
        if gathering.is_open:
            gathering.began()
        num_begun += gathering.is_open
        waited = 0 if gathering.is_open else waited + 1
        assert waited < PASSES
        gathering.is_open = False
    assert num_begun == 1 + (len(passes) - 1) // PASSES
