"""Block accounting and lane arrangement, against simple models of both."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.kv_cache import SCRATCH_BLOCK, BlockPool, block_digests, num_common
from headrace.engines.lanes import Lanes


def test_digests_cover_everything_before_and_extend_in_place():
    tokens = np.arange(20, dtype=np.int32)
    first = block_digests(tokens[:9], 4, [])
    assert len(first) == 2
    assert block_digests(tokens, 4, list(first))[:2] == first
    other = tokens.copy()
    other[0] = 99
    assert block_digests(other, 4, [])[1] != first[1]


def test_only_blocks_of_the_current_version_are_found():
    pool = BlockPool(4)
    block = pool.allocate(version=1)
    pool.publish(block, b"old", version=2)
    assert not pool.share([b"old"])
    pool.publish(block, b"now", version=1)
    assert pool.share([b"now"]) == [block]
    pool.forget()
    assert not pool.share([b"now"])


def test_sharing_ends_at_the_first_block_that_is_not_there():
    pool = BlockPool(5)
    blocks = [pool.allocate(0) for _ in range(3)]
    for block, digest in zip(blocks, (b"a", b"b", b"d"), strict=True):
        pool.publish(block, digest, 0)
    pool.release(blocks)
    assert pool.share([b"a", b"b", b"c", b"d"]) == blocks[:2]
    assert pool.num_free == 2 and pool.share([]) == []


def test_released_blocks_stay_findable_until_needed():
    pool = BlockPool(3)
    a, b = pool.allocate(0), pool.allocate(0)
    pool.publish(a, b"a", 0)
    pool.release([a, b])
    assert pool.num_free == 2
    assert pool.share([b"a"]) == [a]
    assert pool.allocate(0) == b and pool.allocate(0) is None
    pool.release([a])
    assert pool.allocate(0) == a and not pool.share([b"a"])


def test_a_chain_is_evicted_from_its_end():
    """Without its first block the rest of it could not be found."""
    pool = BlockPool(3)
    chain = [pool.allocate(0), pool.allocate(0)]
    for block, digest in zip(chain, (b"a", b"b"), strict=True):
        pool.publish(block, digest, 0)
    pool.release(chain)
    assert pool.allocate(0) == chain[1] and pool.share([b"a", b"b"]) == chain[:1]


def test_blocks_that_nobody_uses_are_findable_but_not_held():
    """To share them takes free ones, and who is admitted must not count on more than there are."""
    pool = BlockPool(3)
    block = pool.allocate(0)
    pool.publish(block, b"a", 0)
    assert pool.num_held([b"a", b"b"]) == 1
    pool.release([block])
    pool.tidy()
    assert pool.is_findable(block) and pool.num_held([b"a", b"b"]) == 0


def test_forgetting_one_adapter_leaves_the_blocks_of_another():
    pool = BlockPool(5)
    blocks = {name: pool.allocate(0, adapter) for name, adapter in ((b"a", 0), (b"b", 1), (b"c", 0))}
    for name, block in blocks.items():
        pool.publish(block, name, 0)
    pool.release([blocks[b"a"], blocks[b"b"]])
    pool.forget(0)
    assert not pool.share([b"a"]) and not pool.share([b"c"])
    assert pool.share([b"b"]) == [blocks[b"b"]]
    pool.release([blocks[b"b"]])
    pool.forget(1)
    assert not pool.share([b"b"]) and pool.num_free == 3
    pool.release([blocks[b"c"]])
    assert sorted(pool.allocate(0) for _ in range(4)) == [1, 2, 3, 4]


def test_blocks_that_leave_and_are_found_again_meanwhile_stay_held():
    pool = BlockPool(3)
    a, b = pool.allocate(0), pool.allocate(0)
    pool.publish(a, b"a", 0)
    pool.release([a, b])
    assert pool.share([b"a"]) == [a]
    pool.tidy()
    assert pool.num_free == 1 and pool.allocate(0) == b and pool.allocate(0) is None


def test_a_block_released_more_often_than_held_is_noticed():
    pool = BlockPool(3)
    block = pool.allocate(0)
    pool.release([block, block])
    with pytest.raises(AssertionError, match="released more often"):
        pool.tidy()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=60))
def test_every_block_is_in_exactly_one_place(actions):
    pool, held, version = BlockPool(6), [], 0
    for action, pick in actions:
        if action == 0:
            block = pool.allocate(version)
            assert (block is None) == (len(set(held)) == pool.capacity)
            held += [] if block is None else [block]
        elif action == 1 and held:
            pool.release([held.pop(pick % len(held))])
        elif action == 2 and held:
            pool.publish(held[pick % len(held)], bytes([pick]), version)
        elif action == 3:
            held += pool.share([bytes([pick])])
        elif action == 4:
            pool.forget()
            version += 1
        assert SCRATCH_BLOCK not in held
        assert pool.num_free + len(set(held)) == pool.capacity


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, 6), st.sampled_from((32, 48, 64))), max_size=25), st.randoms())
def test_lane_rows_hold_the_sequence_they_name(steps, random):
    """Plays moves and loads on a model of the memory: each row must end up with its own tenant's content."""
    lanes, content, tenant_of, length_of, placed = Lanes(7), {}, {}, {}, 0
    for step in steps:
        for slot, length in step.items():
            if slot not in tenant_of or length < length_of[slot] or random.random() < 0.2:
                placed += 1
                tenant_of[slot] = placed
            length_of[slot] = length
        slots = np.array(list(step), dtype=np.int64)
        tenants = np.array([tenant_of[s] for s in step], dtype=np.int64)
        named = []
        lengths = np.array(list(step.values()), dtype=np.int64)
        for rows in lanes.arrange(slots, tenants, lengths, positions=lengths - 1, num_changes=placed):
            memory = content.setdefault(rows.lane.kv_length, {})
            if rows.moves is not None:
                memory.update(dict(zip(rows.moves[0], [memory[r] for r in rows.moves[1]], strict=True)))
            for row in [] if rows.loads is None else rows.loads:
                memory[row] = tenant_of[rows.slots[row]]
            assert [memory[row] for row in range(len(rows.slots))] == [tenant_of[s] for s in rows.slots]
            assert all(step[s] == rows.lane.kv_length for s in rows.slots)
            named += rows.slots.tolist()
        assert sorted(named) == sorted(step)


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_common_blocks_are_those_up_to_the_first_difference(one, other):
    digests = [block_digests(np.array(ids, dtype=np.int32), 4, []) for ids in (one, other)]
    blocks = [[tuple(ids[i : i + 4]) for i in range(0, len(ids) - 3, 4)] for ids in (one, other)]
    expected = 0
    for a, b in zip(*blocks, strict=False):
        if a != b:
            break
        expected += 1
    assert num_common(*digests) == expected
