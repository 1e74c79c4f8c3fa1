"""Rows of kept tokens, against the same done with lists of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.data import masks
from headrace.types import SamplingMask

ROWS = st.lists(st.lists(st.integers(0, 12), max_size=4), max_size=7)


def mask_of(rows: list[list[int]]) -> SamplingMask:
    ids = np.array([i for row in rows for i in row], dtype=np.int32)
    return SamplingMask(token_ids=ids, offsets=np.cumsum([0, *map(len, rows)]).astype(np.int64))


def rows_of(mask: SamplingMask) -> list[list[int]]:
    assert mask.token_ids.dtype == np.int32 and mask.offsets.dtype == np.int64
    return [mask.token_ids[a:b].tolist() for a, b in zip(mask.offsets[:-1], mask.offsets[1:], strict=True)]


@given(rows=ROWS, data=st.data())
def test_cutting_choosing_and_joining_are_those_of_lists(rows, data):
    mask = mask_of(rows)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert rows_of(masks.cut(mask, start, stop)) == rows[start:stop]
    assert rows_of(masks.join([masks.cut(mask, 0, start), masks.whole(2), masks.cut(mask, start, len(rows))])) == [
        *rows[:start], [], [], *rows[start:]
    ]  # fmt: skip
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1))) if rows else []
    assert rows_of(masks.rows_at(mask, np.array(chosen, dtype=np.int64))) == [rows[i] for i in chosen]
    widest = max(map(len, rows), default=0)
    row, count = masks.widest_row(mask)
    assert count == widest and (not rows or len(rows[row]) == widest)


@given(rows=ROWS, seed=st.integers(0, 2**16), vocab_size=st.integers(6, 14))
def test_faults_are_those_that_lists_show(rows, seed, vocab_size):
    rng = np.random.default_rng(seed)
    # Mostly a token of the row, so that sound masks are met too.
    tokens = [
        int(rng.choice(row)) if row and rng.random() < 0.9 else int(rng.integers(0, 13)) for row in rows
    ]
    found = masks.fault(mask_of(rows), np.array(tokens, dtype=np.int32), vocab_size=vocab_size)
    beyond = any(i >= vocab_size for row in rows for i in row)
    doubled = any(len(set(row)) < len(row) for row in rows)
    without = [n for n, row in enumerate(rows) if row and tokens[n] not in row]
    if beyond:
        assert found is not None and "vocabulary" in found
    elif doubled:
        assert found == "a row holds an id twice"
    elif without:
        assert found == f"row {without[0]} does not hold the sampled token {tokens[without[0]]}"
    else:
        assert found is None


def test_offsets_that_divide_nothing_are_a_fault():
    mask = mask_of([[1, 2], [3]])
    tokens = np.array([1, 3], dtype=np.int32)
    for offsets in ([1, 2, 3], [0, 2, 2], [0, 4, 3]):
        broken = SamplingMask(token_ids=mask.token_ids, offsets=np.array(offsets))
        assert "offsets" in (masks.fault(broken, tokens) or "")
    assert masks.fault(mask, tokens[:1]) == "it has 2 rows for 1 tokens"
