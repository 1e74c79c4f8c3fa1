"""Prompts that fill their blocks, whose last row members of a group compute for its logits alone."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engines import device_kernels
from headrace.engines.gathering import Gathering
from headrace.engines.holds import Holds
from headrace.engines.kv_cache import SCRATCH_BLOCK, BlockPool
from headrace.engines.scheduler import Scheduler
from headrace.engines.sequences import SlotTable, new_sequence
from headrace.models.paged_attention import KvTensors

SIZE = 16
PROMPT = np.arange(SIZE) % 61


def group(make_request, count=3, **sampling):
    return [
        make_request(f"g{i}", prompt=PROMPT, seed=i, **{"max_tokens": 4, **sampling}) for i in range(count)
    ]


def test_a_pass_may_hold_such_a_row_beside_rows_that_are_written(
    make_engine, run_engine, make_request, same_bits
):
    engine = make_engine()
    run_engine(engine, *group(make_request, 1))
    both = [make_request("a", prompt=PROMPT, seed=5), make_request("b", prompt=np.append(PROMPT, 7), seed=6)]
    done = run_engine(engine, *both)
    for request in both:
        assert same_bits(run_engine(make_engine(), request)[request.id], done[request.id])


def assert_written_once(places):
    """But for the scratch block, which is nobody's."""
    own = [place for place in places if place // SIZE != SCRATCH_BLOCK]
    assert own and len(own) == len(set(own))


def test_rows_are_written_once(make_engine, run_engine, make_request, monkeypatch):
    written, write = [], KvTensors.write

    def watched(tensors, layer, slots, rows):
        written.extend(slots.tolist() if layer == 0 else [])
        return write(tensors, layer, slots, rows)

    engine = make_engine()
    monkeypatch.setattr(KvTensors, "write", watched)
    run_engine(engine, *group(make_request))
    assert_written_once(written)


def test_rows_are_written_once_on_the_device(make_device_engine, run_engine, make_request, monkeypatch):
    written, write = [], device_kernels._write

    def watched(pool, places, keys, values):
        written.append((pool.data_ptr(), places.clone()))
        return write(pool, places, keys, values)

    engine = make_device_engine()
    monkeypatch.setattr(device_kernels, "_write", watched)
    run_engine(engine, *group(make_request))
    first_layer = written[0][0]
    assert_written_once(
        [place for layer, places in written if layer == first_layer for place in places.tolist()]
    )


@pytest.mark.parametrize(("num_blocks", "num_running"), [(5, 3), (4, 2), (3, 1)])
def test_members_need_no_room_for_a_prompt_that_another_holds(make_request, num_blocks, num_running):
    """Of three members one needs a block for the prompt, and each one to grow. One block is for scratch."""
    pool = BlockPool(num_blocks)
    holds = Holds(pool, lambda: 0.0)
    scheduler = Scheduler(pool, SlotTable(4, SIZE), holds, prefill_tokens=100, gathering=Gathering(False))
    scheduler.waiting.extend(new_sequence(request, 60) for request in group(make_request))
    scheduler.next_work(np.zeros(1, dtype=np.int64))
    assert len(scheduler.running) == num_running
