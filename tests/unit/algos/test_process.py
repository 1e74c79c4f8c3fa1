"""Step advantages against their formulas, written out token by token."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.algos.process import (
    FORMS,
    min_form,
    potential_form,
    sum_form,
    token_advantages,
    trajectory_advantages,
)

SCORES = [np.array([0.2, 0.9, -0.3]), np.array([0.5]), np.array([-1.0, 0.4])]
ENDS = [np.array([2, 3, 7]), np.array([4]), np.array([1, 3])]


def test_sum_form_is_the_sum_of_normalised_scores_of_the_steps_not_yet_ended():
    every = np.concatenate(SCORES)
    found = sum_form(SCORES)
    for scores, values in zip(SCORES, found, strict=True):
        for step in range(len(scores)):
            wanted = sum((r - every.mean()) / (every.std(ddof=1) + 1e-4) for r in scores[step:])
            assert values[step] == pytest.approx(wanted)


def test_min_form_follows_the_worst_step():
    found = min_form(SCORES)
    weighted = []
    for scores in SCORES:
        total = sum(np.exp(-r / 0.1) for r in scores)
        weighted.append([np.exp(-r / 0.1) / total * r for r in scores])
    for i, values in enumerate(found):
        others = [r for j, row in enumerate(weighted) if j != i for r in row]
        for step in range(len(values)):
            wanted = sum(r - np.mean(others) for r in weighted[i][step:])
            assert values[step] == pytest.approx(wanted)
    # Without the baseline, what is to come is close to the least of what is to come.
    assert sum(weighted[0]) == pytest.approx(min(SCORES[0]), abs=0.05)


def test_min_form_survives_scores_far_apart():
    assert np.isfinite(np.concatenate(min_form([np.array([1e4, -1e4]), np.array([0.0])]))).all()


def test_potentials_telescope_whatever_lies_between():
    start = np.mean([scores[0] for scores in SCORES])
    for scores, values in zip(SCORES, potential_form(SCORES), strict=True):
        assert values.sum() == pytest.approx(scores[-1] - start)
    detour = potential_form([np.array([0.1, 5.0, -3.0, 0.6]), np.array([0.1, 0.6])])
    assert detour[0].sum() == pytest.approx(detour[1].sum())


@pytest.mark.parametrize("form", FORMS)
def test_every_token_of_a_step_gets_its_steps_advantage_on_top_of_the_outcomes(form):
    outcome = np.array([1.0, 0.0, -1.0])
    found = token_advantages(outcome, ENDS, SCORES, form=form, weight=0.5)
    shaped = FORMS[form](SCORES)
    for i, (ends, values) in enumerate(zip(ENDS, found, strict=True)):
        assert values.dtype == np.float32
        assert len(values) == ends[-1]
        for token, value in enumerate(values):
            step = int(np.argmax(ends > token))
            assert value == pytest.approx(outcome[i] + 0.5 * shaped[i][step], abs=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_an_attempt_without_scores_keeps_its_outcome_and_moves_no_baseline(form):
    nothing = np.zeros(0)
    outcome = [1.0, 0.25, -1.0]
    found = token_advantages(
        outcome, [ENDS[0], nothing, ENDS[2]], [SCORES[0], nothing, SCORES[2]], form=form, weight=1.0
    )
    alone = token_advantages([1.0, -1.0], [ENDS[0], ENDS[2]], [SCORES[0], SCORES[2]], form=form, weight=1.0)
    assert found[1] == 0.25
    np.testing.assert_array_equal(found[0], alone[0])
    np.testing.assert_array_equal(found[2], alone[1])
    assert token_advantages(outcome, [nothing] * 3, [nothing] * 3, form=form, weight=1.0) == outcome


@pytest.mark.parametrize("form", FORMS)
def test_a_trajectory_begins_anew_and_is_compared_with_those_in_its_place(form):
    """The last attempt was not scored, the second has one trajectory, and the third one without any token."""
    nothing = (np.zeros(0, np.int32), np.zeros(0, np.float32))
    pairs = list(zip(ENDS, SCORES, strict=True))
    steps = [[pairs[0], pairs[1]], [pairs[2]], [pairs[1], nothing], []]
    outcome = [1.0, -1.0, 0.5, 2.0]
    found = trajectory_advantages(outcome, steps, form=form, weight=0.3)
    first = token_advantages(
        outcome[:3],
        [ENDS[0], ENDS[2], ENDS[1]],
        [SCORES[0], SCORES[2], SCORES[1]],
        form=form,
        weight=0.3,
    )
    (second,) = token_advantages(outcome[:1], [ENDS[1]], [SCORES[1]], form=form, weight=0.3)
    np.testing.assert_allclose(found[0], np.concatenate([first[0], second]))
    np.testing.assert_allclose(found[1], first[1])
    np.testing.assert_allclose(found[2], first[2])
    assert found[3] == 2.0
    assert trajectory_advantages(outcome, [[]] * 4, form=form, weight=0.3) == outcome
