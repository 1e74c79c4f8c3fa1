"""How the key-value rows of a decode pass are dealt out to programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.dealing import MAX_SPANS, MIN_SPAN, deal_out, most_spans, spans_of_rows


@pytest.mark.parametrize(
    ("own", "at_once", "expected"),
    [
        pytest.param([1000] * 8, 32, [4] * 8, id="all alike"),
        pytest.param([1000] * 8, 31, [3] * 8, id="one more each would have to wait"),
        pytest.param([1000] * 8, 4, [1] * 8, id="more rows than run at once"),
        pytest.param(
            [300, 500, 200], 64, [2, 2, 1], id="none shorter than is worth a program, but for a rest"
        ),
        pytest.param([16_000, *[800] * 15], 32, [17, *[1] * 15], id="one that is far longer"),
        pytest.param([16_000, *[800] * 15], 16, [10, *[1] * 15], id="one that is far longer, and no room"),
        pytest.param([90_000, 0], 300, [MAX_SPANS, 1], id="no more than are joined, and padding"),
        pytest.param([0, 0, 0], 12, [1, 1, 1], id="nothing to read"),
        pytest.param(
            [1000, 1000, *[0] * 7], 5, [2, 2, *[1] * 7], id="two with room for five, padding not counted"
        ),
        pytest.param([40_000, *[500] * 8], 8, [8, *[1] * 8], id="more rows than run at once, one longer"),
        pytest.param([1500, 500, 500, 500], 4, [1] * 4, id="as many rows as run at once, one twice a share"),
        pytest.param([3000, *[300] * 9], 10, [6, *[1] * 9], id="none longer than an even share"),
    ],
)
def test_rows_are_dealt_out_evenly(own, at_once, expected):
    assert deal_out(np.array(own), at_once).tolist() == expected


@settings(max_examples=300, deadline=None)
@given(own=st.lists(st.integers(0, 40_000), min_size=1, max_size=64), at_once=st.integers(1, 400))
def test_there_is_room_for_every_list_and_none_of_it_waits_without_need(own, at_once):
    own = np.array(own)
    counts = deal_out(own, at_once)
    assert counts.min() >= 1 and counts.max() <= MAX_SPANS
    assert counts.sum() <= most_spans(len(own), at_once)
    even = max(MIN_SPAN, own.sum() / at_once)
    run_at_once = counts[own > 0].sum() <= at_once
    longest = (2 if run_at_once else 1) * even
    assert (own / counts <= np.maximum(longest, own / MAX_SPANS) * (1 + 1e-9)).all()
    if (own > 0).sum() + own.sum() / (2 * even) <= at_once:
        assert run_at_once


@settings(max_examples=100, deadline=None)
@given(own=st.lists(st.integers(0, 9000), min_size=1, max_size=20), at_once=st.integers(1, 60))
def test_a_list_names_the_row_of_every_span(own, at_once):
    counts = deal_out(np.array(own), at_once)
    spans = spans_of_rows(np.array(own), at_once, torch.device("cpu"))
    assert len(spans.rows) == most_spans(len(own), at_once) and len(spans.firsts) == len(own) + 1
    listed = int(spans.firsts[-1])
    assert (spans.rows[listed:] == -1).all()
    for row, count in enumerate(counts.tolist()):
        first, end = spans.firsts[row : row + 2].tolist()
        assert end - first == count and (spans.rows[first:end] == row).all()
