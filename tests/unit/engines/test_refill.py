"""A full engine is refilled several slots at a time: prompts beside decoding rows cost a reading of the weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.types import ForkPoint

SLOTS, REFILL = 64, 4
"""A sixteenth of the slots."""


@pytest.fixture(params=["plain", "device"])
def full_engine(request, make_engine, make_device_engine):
    def build(**settings):
        make = make_engine if request.param == "plain" else make_device_engine
        return make(**{"max_running": SLOTS, "kv_tokens": SLOTS * 96, "prefill_tokens": 1024, **settings})

    return build


def starts(engine, num_passes):
    """How many requests begin in each pass."""
    counts, known = [], set(engine.started_ids())
    for _ in range(num_passes):
        engine.step()
        counts.append(len(set(engine.started_ids()) - known))
        known |= set(engine.started_ids())
    return counts


def test_slots_that_come_free_together_are_filled_at_once(full_engine, make_request):
    engine = full_engine()
    for i in range(SLOTS):
        engine.submit(make_request(f"first-{i}", max_tokens=8 + i % 16))
    for i in range(40):
        engine.submit(make_request(f"next-{i}", max_tokens=40))
    counts = [count for count in starts(engine, 20) if count]
    # Four slots come free in every pass from the eighth on.
    assert counts == [SLOTS] + [4] * 10


def test_slots_that_come_free_one_by_one_are_filled_together(full_engine, make_request):
    engine = full_engine()
    for i in range(SLOTS):
        engine.submit(make_request(f"first-{i}", max_tokens=8 + 2 * i if i < 12 else 60))
    for i in range(12):
        engine.submit(make_request(f"next-{i}", max_tokens=40))
    counts = [count for count in starts(engine, 50)[1:] if count]
    # One slot comes free every second pass; the first of three has then waited for four passes.
    assert counts == [3, 3, 3, 3]


def test_a_request_is_put_off_for_so_many_passes_at_most(full_engine, make_request):
    engine = full_engine()
    engine.submit(make_request("short", max_tokens=5))
    for i in range(SLOTS - 1):
        engine.submit(make_request(f"long-{i}", max_tokens=60))
    engine.submit(make_request("next", max_tokens=5))
    engine.step()
    while "short" in engine.started_ids():
        engine.step()
    assert starts(engine, REFILL + 1) == [0] * REFILL + [1]


def test_with_slots_to_spare_a_request_begins_in_the_next_pass(full_engine, make_request):
    engine = full_engine()
    for i in range(SLOTS - REFILL):
        engine.submit(make_request(f"long-{i}", max_tokens=60))
    engine.step()
    engine.submit(make_request("next", max_tokens=5))
    assert starts(engine, 1) == [1]


def test_a_refill_that_one_pass_has_no_room_for_goes_on_in_the_next(full_engine, make_request):
    engine = full_engine(prefill_tokens=24)
    for i in range(SLOTS):
        engine.submit(make_request(f"first-{i}", max_tokens=60 if i >= REFILL else 50 - i))
    while engine.counters()["running"] > SLOTS - REFILL or engine.counters()["waiting"]:
        engine.step()
    for i in range(REFILL):
        engine.submit(make_request(f"next-{i}", prompt=12, max_tokens=5))
    assert starts(engine, 2) == [2, 2]


def test_branches_are_not_put_off(full_engine, make_request):
    engine = full_engine()
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
