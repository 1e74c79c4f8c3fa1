"""Choosing a pivot: segments, the regression on depth, and what is drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algos.pivots import (
    MIN_OUTCOMES,
    PivotRule,
    SuccessModel,
    before_the_worst,
    draw_pivot,
    fit_success,
    pivot_probabilities,
    segment_ends,
)


@pytest.mark.parametrize(
    ("rule", "ends"),
    [
        ({"segment_tokens": 4}, [4, 8]),
        ({"delimiter_ids": (7, 9)}, [3, 8, 10]),
        ({"num_segments": 3}, [4, 7]),
        ({"segment_tokens": 11}, []),
    ],
)
def test_attempts_are_cut_by_length_delimiter_or_number(rule, ends):
    token_ids = np.array([1, 2, 7, 4, 5, 6, 1, 9, 2, 7, 7])
    assert segment_ends(token_ids, PivotRule(branches=2, **rule)).tolist() == ends


@given(
    length=st.integers(0, 40),
    rule=st.one_of(
        st.builds(PivotRule, branches=st.just(2), segment_tokens=st.integers(1, 50)),
        st.builds(PivotRule, branches=st.just(2), num_segments=st.integers(1, 50)),
        st.builds(PivotRule, branches=st.just(2), delimiter_ids=st.just((0, 3))),
    ),
    seed=st.integers(0, 2**32),
)
def test_a_pivot_leaves_something_on_both_sides(length, rule, seed):
    token_ids = np.random.default_rng(seed).integers(0, 5, length)
    pivot = draw_pivot(token_ids, rule, SuccessModel(), np.random.default_rng(seed))
    assert pivot is None or 0 < pivot < length
    assert pivot == draw_pivot(token_ids, rule, SuccessModel(), np.random.default_rng(seed))


def test_the_distribution_is_the_product_of_both_factors():
    model, ends = SuccessModel(2.0, -3.0), np.array([2, 5, 8])
    expected = [1 / (1 + np.exp(-(2.0 - 3.0 * t / 10))) * (t / 10) ** 2.0 for t in ends]
    got = pivot_probabilities(ends, 10, model=model, gamma=2.0)
    np.testing.assert_allclose(got, np.array(expected) / sum(expected), rtol=1e-12)


def test_draws_follow_the_distribution():
    rule, draw = PivotRule(branches=2, segment_tokens=1, gamma=1.0), np.random.default_rng(0)
    token_ids = np.arange(5)
    drawn = np.bincount([draw_pivot(token_ids, rule, SuccessModel(), draw) for _ in range(4000)], minlength=5)
    np.testing.assert_allclose(drawn[1:] / 4000, np.array([1, 2, 3, 4]) / 10, atol=0.03)


def test_no_pivot_lies_behind_the_beginning_of_the_worst_step():
    ends, scores = np.array([4, 9, 15, 20]), np.array([0.5, 0.7, -0.8, -0.8])
    assert before_the_worst(ends, scores) == 9
    assert before_the_worst(ends, -scores) == 4 and before_the_worst(ends, scores * 0) == 0
    rule, tokens, draw = PivotRule(branches=2, segment_tokens=3), np.arange(20), np.random.default_rng(0)
    drawn = {draw_pivot(tokens, rule, SuccessModel(), draw, at_most=9) for _ in range(200)}
    assert drawn == {3, 6, 9}
    # A judge that liked nothing from the start rules nothing out.
    assert {draw_pivot(tokens, rule, SuccessModel(), draw, at_most=2) for _ in range(200)} == {
        3,
        6,
        9,
        12,
        15,
        18,
    }


def test_the_regression_finds_the_slope_and_waits_for_both_kinds():
    draw = np.random.default_rng(1)
    depths = draw.random(4000)
    successes = draw.random(4000) < SuccessModel(1.5, -4.0).probability(depths)
    fitted = fit_success(depths, successes)
    assert fitted.intercept == pytest.approx(1.5, abs=0.25) and fitted.slope == pytest.approx(-4.0, abs=0.5)
    assert fit_success(depths[:MIN_OUTCOMES], [True] * MIN_OUTCOMES) == SuccessModel()
    assert fit_success(depths[: MIN_OUTCOMES - 1], successes[: MIN_OUTCOMES - 1]) == SuccessModel()


def test_outcomes_that_depth_separates_have_a_finite_fit():
    depths = np.linspace(0.01, 0.99, 40)
    fitted = fit_success(depths, depths < 0.5)
    assert fitted.probability(np.array([0.1]))[0] > 0.95 > 0.05 > fitted.probability(np.array([0.9]))[0]
