"""Prompt passes padded to buckets, computed with plain torch as a GPU would replay them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from headrace.engines.kv_cache import SCRATCH_BLOCK
from headrace.engines.pieces import Piece, lay_out
from headrace.engines.prompt_batches import PromptBatch, PromptBatches, bucket_rows

SIZE = 16


def piece(slot, start, count, *, adapter=0):
    blocks = 100 * (slot + 1) + np.arange(40)
    return Piece(slot, start, np.arange(start, start + count) + 1000 * slot, blocks, adapter)


def test_pieces_lie_one_behind_the_other():
    layout = lay_out([piece(3, 14, 4), piece(0, 0, 2, adapter=5)], block_size=16)
    tokens, positions, places, adapters = layout.rows.tolist()
    assert tokens == [3014, 3015, 3016, 3017, 0, 1]
    assert positions == [14, 15, 16, 17, 0, 1]
    assert places == [400 * 16 + 14, 400 * 16 + 15, 401 * 16, 401 * 16 + 1, 100 * 16, 100 * 16 + 1]
    assert adapters == [0, 0, 0, 0, 5, 5]
    assert layout.pieces.tolist() == [[3, 0], [14, 0], [4, 2], [0, 4]]
    assert layout.blocks.tolist() == [[400, 401], [100, 101]]
    assert layout.last_rows([0, 1]).tolist() == [3, 5] and layout.last_rows([]).tolist() == []


def test_rows_that_are_there_already_are_written_to_the_scratch_block():
    first, last = piece(0, 0, 2 * SIZE), piece(1, 2 * SIZE - 1, 1)
    layout = lay_out([first, replace(last, blocks=first.blocks, only_logits=True)], SIZE)
    assert layout.rows[1, -2:].tolist() == [2 * SIZE - 1] * 2, "both rows are at the same position"
    assert layout.places[-1] == SCRATCH_BLOCK * SIZE + SIZE - 1
    assert len(set(layout.places.tolist())) == 2 * SIZE + 1


@pytest.mark.parametrize("most", [1, 17, 64, 65, 300, 4096, 16384])
def test_buckets_hold_whatever_is_not_too_large_and_waste_little(most):
    sizes = bucket_rows(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, 4096)
    for before, size in pairwise(sizes):
        assert size <= 2 * before and (before < 512 or size <= 1.26 * before)


def batches(most_rows=64, most_pieces=8):
    seen = []
    return PromptBatches(
        most_rows,
        most_pieces,
        torch.device("cpu"),
        seen.append,
        graphs=None,
        progress=lambda line: None,
    ), seen


def test_what_a_bucket_does_not_fill_belongs_to_nobody():
    prompts, seen = batches()
    first, second = (
        lay_out([piece(1, 0, 30), piece(2, 5, 20)], 16),
        lay_out([piece(4, 2, 3, adapter=1)], 16),
    )
    assert prompts.run(first, first.last_rows([0, 1])) and prompts.run(second, second.last_rows([0]))
    batch: PromptBatch = seen[-1]
    assert batch.num_rows == 64 and batch.num_pieces == 8
    assert batch.counts.tolist() == [3, 0, 0, 0, 0, 0, 0, 0]
    assert batch.slots.tolist()[0] == 4 and batch.starts.tolist()[0] == 2
    assert batch.places[:3].tolist() == [500 * 16 + 2, 500 * 16 + 3, 500 * 16 + 4]
    assert not batch.places[3:].any(), "padding is written to the block that nobody reads"
    assert batch.adapters.tolist()[:4] == [1, 1, 1, 0]
    assert batch.wanted.tolist() == [2, 0, 0, 0, 0, 0, 0, 0]


def test_passes_that_no_bucket_holds_are_left_to_others():
    prompts, seen = batches(most_rows=64, most_pieces=3)
    too_long = lay_out([piece(0, 0, 65)], 16)
    too_many = lay_out([piece(slot, 0, 2) for slot in range(4)], 16)
    for layout in (too_long, too_many):
        assert not prompts.run(layout, layout.last_rows([0]))
    assert not seen
