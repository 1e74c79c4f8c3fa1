"""Which rows are said to share their prompts, against block tables compared one by one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.sequences import SlotTable, new_sequence
from headrace.engines.shared_prompts import SharedPromptFinder, shared_prompts
from headrace.kernels.shared_prefixes import MAX_MEMBERS
from headrace.types import Request, Sampling

SIZE = 4


def pieces_of(found):
    """(rows, columns in common) of each piece."""
    bounds = found.starts.tolist()
    pieces = [found.members[a:b].tolist() for a, b in pairwise(bounds)]
    return [(piece, int(found.begins[piece[0]]) // SIZE) for piece in pieces]


def common_columns(blocks, depths, rows):
    """Leading columns in which all these rows agree."""
    columns = int(depths[rows].min())
    same = [len({int(blocks[row, column]) for row in rows}) == 1 for column in range(columns)]
    return columns if all(same) else same.index(False)


@st.composite
def tables(draw):
    """Rows that branch off from one another, as sequences with common prompts do, behind which comes padding."""
    num_rows, num_columns = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    fresh = iter(np.random.default_rng(draw(st.integers(0, 999))).permutation(5000) + 1)
    blocks = np.zeros((num_rows, num_columns + 2), dtype=np.int64)
    depths = np.zeros(num_rows, dtype=np.int64)
    for row in range(num_rows):
        depths[row] = depth = draw(st.integers(0, num_columns))
        blocks[row, :depth] = [next(fresh) for _ in range(depth)]
        if row and draw(st.booleans()):
            other = draw(st.integers(0, row - 1))
            shared = draw(st.integers(0, min(depth, int(depths[other]))))
            blocks[row, :shared] = blocks[other, :shared]
    return blocks, depths


@given(tables())
def test_every_piece_shares_what_it_is_said_to(case):
    blocks, depths = case
    found = shared_prompts(blocks, depths, SIZE)
    pieces = pieces_of(found)
    for rows, columns in pieces:
        assert 2 <= len(rows) <= MAX_MEMBERS
        assert columns == common_columns(blocks, depths, rows) > 0
        assert (found.begins[rows] == columns * SIZE).all()
    members = [row for rows, _ in pieces for row in rows]
    assert len(set(members)) == len(members)
    assert not np.delete(found.begins, members).any()
    assert found.saved_tokens == sum((len(rows) - 1) * columns * SIZE for rows, columns in pieces)
    assert found.num_pieces == len(pieces)


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    columns=st.integers(2, 40),
    system=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_groups_are_found_whole_in_any_order(sizes, columns, system, seed):
    """Each group has a prompt of its own behind a first block that all groups may have in common."""
    rng = np.random.default_rng(seed)
    prompts = 1 + rng.permutation(len(sizes) * columns).reshape(len(sizes), columns)
    if system:
        prompts[:, 0] = 10_000
    group_of = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    found = shared_prompts(prompts[group_of], np.full(len(group_of), columns), SIZE)
    # No choice of pieces reads less: each full piece of a group once, and what is left of it once.
    pieces = [(rows, shared) for rows, shared in pieces_of(found) if shared == columns]
    for group, size in enumerate(sizes):
        counts = sorted(len(rows) for rows, _ in pieces if group_of[rows[0]] == group)
        left = [size % MAX_MEMBERS] if size % MAX_MEMBERS > 1 else []
        assert counts == sorted([MAX_MEMBERS] * (size // MAX_MEMBERS) + left)


def test_rows_that_share_less_with_a_group_stay_out_of_it():
    blocks = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 9, 9], [1, 2, 3, 4], [1, 7, 7, 7], [5, 6, 0, 0]])
    found = shared_prompts(blocks, np.array([4, 4, 4, 4, 4, 2]), SIZE)
    assert pieces_of(found) == [([0, 1, 3], 4)]


@pytest.mark.parametrize("shape", [(0, 0), (1, 0), (3, 0), (1, 5)])
def test_too_few_rows_or_columns_share_nothing(shape):
    blocks = np.ones(shape, dtype=np.int64)
    found = shared_prompts(blocks, np.full(shape[0], shape[1]), SIZE)
    assert found.num_pieces == 0 and found.saved_tokens == 0 and len(found.begins) == shape[0]


def test_a_slot_that_another_sequence_took_is_looked_at_again():
    table, slots = SlotTable(3, SIZE), np.arange(3)

    def place(blocks):
        request = Request(id="r", prompt_ids=np.arange(13), sampling=Sampling(max_tokens=9), seed=0)
        sequence = new_sequence(request, 22)
        table.place(sequence)
        table.blocks[sequence.slot, :4] = blocks
        table.computed[sequence.slot] = 13
        return sequence

    finder = SharedPromptFinder()
    sequences = [place([1, 2, 3, own]) for own in (4, 5, 6)]
    first = finder.find(table, slots)
    assert pieces_of(first) == [([0, 1, 2], 3)]
    table.computed[:] += 1
    assert finder.find(table, slots) is first
    table.lift(sequences[1])
    place([7, 8, 9, 10])
    assert pieces_of(finder.find(table, slots)) == [([0, 2], 3)]
    assert finder.find(table, slots[:1]).num_pieces == 0


def test_a_prompt_that_fills_its_blocks_is_shared_to_its_end():
    """But not by a row that is its last one still."""
    table, slots = SlotTable(3, SIZE), np.arange(3)
    for own in (4, 5, 6):
        request = Request(id="r", prompt_ids=np.arange(3 * SIZE), sampling=Sampling(max_tokens=9), seed=0)
        sequence = new_sequence(request, 4 * SIZE)
        table.place(sequence)
        table.blocks[sequence.slot, :4] = [1, 2, 3, own]
    table.computed[:] = 3 * SIZE
    assert pieces_of(SharedPromptFinder().find(table, slots)) == [([0, 1, 2], 3)]
    table.computed[:] = 3 * SIZE - 1
    assert pieces_of(SharedPromptFinder().find(table, slots)) == [([0, 1, 2], 2)]
