"""Law two: at any moment the seconds by activity sum to the worker's age."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.timekeeping import (
    CONTROLLER_ACTIVITIES,
    ENGINE_ACTIVITIES,
    TRAINER_ACTIVITIES,
    TimeLedger,
)


class Clock:
    """Stands still until told otherwise."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def engine_ledger(clock: Clock) -> TimeLedger:
    return TimeLedger(ENGINE_ACTIVITIES, clock=clock)


def test_time_goes_to_the_activity_that_ends():
    clock = Clock()
    ledger = engine_ledger(clock)
    clock.now += 2
    ledger.switch("decode")
    clock.now += 3
    assert ledger.seconds() == {
        "loading": 2.0,
        "prefill": 0.0,
        "decode": 3.0,
        "idle-no-work": 0.0,
        "paused-for-weights": 0.0,
    }


def test_reading_does_not_change_the_activity_and_counts_nothing_twice():
    clock = Clock()
    ledger = engine_ledger(clock)
    clock.now += 1
    assert ledger.seconds()["loading"] == 1
    assert ledger.current == "loading"
    clock.now += 1
    assert ledger.seconds()["loading"] == 2
    assert ledger.seconds()["loading"] == 2


def test_what_was_read_stays_as_it_was():
    clock = Clock()
    ledger = engine_ledger(clock)
    before = ledger.seconds()
    clock.now += 1
    ledger.seconds()
    assert before["loading"] == 0


def test_nested_activities_return_to_the_outer_one():
    clock = Clock()
    ledger = TimeLedger(TRAINER_ACTIVITIES, start="waiting-for-batch", clock=clock)
    with ledger.activity("publishing"):
        clock.now += 1
        with ledger.activity("checkpoint"):
            clock.now += 10
        assert ledger.current == "publishing"
        clock.now += 2
    clock.now += 4
    seconds = ledger.seconds()
    assert ledger.current == "waiting-for-batch"
    assert (seconds["publishing"], seconds["checkpoint"], seconds["waiting-for-batch"]) == (3, 10, 4)


def test_an_activity_that_raises_is_charged_and_ended():
    clock = Clock()
    ledger = TimeLedger(CONTROLLER_ACTIVITIES, start="waiting", clock=clock)
    with pytest.raises(KeyError), ledger.activity("working"):
        clock.now += 5
        raise KeyError
    assert ledger.current == "waiting"
    assert ledger.seconds()["working"] == 5


def test_split_divides_a_span_by_weight():
    clock = Clock()
    ledger = engine_ledger(clock)
    ledger.switch("decode")
    clock.now += 8
    ledger.split({"prefill": 30, "decode": 10}, then="idle-no-work")
    clock.now += 1
    seconds = ledger.seconds()
    assert (seconds["prefill"], seconds["decode"], seconds["idle-no-work"]) == (6, 2, 1)


def test_unknown_activities_are_refused():
    ledger = engine_ledger(Clock())
    with pytest.raises(AssertionError, match="dreaming"):
        ledger.switch("dreaming")
    with pytest.raises(AssertionError):
        TimeLedger(ENGINE_ACTIVITIES, start="dreaming")
    with pytest.raises(AssertionError):
        ledger.split({}, then="decode")


actions = st.one_of(
    st.tuples(st.just("switch"), st.sampled_from(ENGINE_ACTIVITIES)),
    st.tuples(st.just("read"), st.none()),
    st.tuples(
        st.just("split"),
        st.dictionaries(st.sampled_from(ENGINE_ACTIVITIES), st.floats(0.125, 100), min_size=1),
    ),
)


@given(st.lists(st.tuples(st.floats(0, 1e4), actions)))
def test_seconds_sum_to_the_age_after_any_history(history):
    clock = Clock()
    born = clock.now
    ledger = engine_ledger(clock)
    for wait, (action, argument) in history:
        clock.now += wait
        if action == "switch":
            ledger.switch(argument)
        elif action == "split":
            ledger.split(argument, then="decode")
        seconds = ledger.seconds()
        assert sum(seconds.values()) == pytest.approx(clock.now - born)
        assert min(seconds.values()) >= 0
