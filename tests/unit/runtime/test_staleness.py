from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.staleness import decide, feasible


def test_waits_until_a_batch_is_complete():
    decision = decide({1: 0}, {2: 0}, version=0, groups_per_step=2, max_lag=1, policy="pace")
    assert decision.take is None
    assert "1 more finished group" in decision.waits_for


def test_takes_the_oldest_and_orders_by_group():
    decision = decide({5: 3, 4: 2, 9: 2, 7: 3}, {}, version=3, groups_per_step=3, max_lag=4, policy="pace")
    assert decision.take == (4, 5, 9)


def test_pace_waits_for_a_straggler_that_the_step_would_push_past_the_bound():
    buffered, unfinished = {4: 1, 5: 1}, {3: 0}
    ask = {"version": 1, "groups_per_step": 2, "max_lag": 1}
    assert decide(buffered, unfinished, policy="pace", **ask).take is None
    assert decide(buffered, unfinished, policy="drop", **ask).take == (4, 5)


def test_pace_sees_further_than_the_next_step():
    # Four unfinished groups of version 0 need two steps, started from versions 1 and 2; training the
    # two fresh ones first would leave only one step for them.
    buffered, unfinished = {6: 1, 7: 1}, {2: 0, 3: 0, 4: 0, 5: 0}
    decision = decide(buffered, unfinished, version=1, groups_per_step=2, max_lag=2, policy="pace")
    assert decision.take is None
    assert "group 2" in decision.waits_for


def test_groups_past_the_bound_are_dropped():
    decision = decide({1: 0, 2: 3}, {3: 1}, version=3, groups_per_step=1, max_lag=1, policy="drop")
    assert decision.drop == (1, 3)
    assert decision.take is None


@given(
    max_lag=st.integers(0, 4),
    groups_per_step=st.integers(1, 4),
    unused=st.integers(0, 16),
    choices=st.lists(st.integers(0, 10**6), min_size=1, max_size=300),
)
def test_under_admission_pace_never_strands_a_group(max_lag, groups_per_step, unused, choices):
    """Random order of finishing and of weights landing: every group is trained within the bound, and
    the trainer is never stuck once everything under way has finished, however few of the slots are used."""
    capacity = max(groups_per_step, (max_lag + 1) * groups_per_step - unused)
    trainer = engines = 0
    unfinished: dict[int, int] = {}
    buffered: dict[int, int] = {}
    landing: list[int] = []
    held = next_group = 0
    for choice in choices:
        while held < capacity:
            unfinished[next_group] = engines
            next_group, held = next_group + 1, held + 1
        moves = ["step"] + ["finish"] * bool(unfinished) + ["land"] * bool(landing)
        move = moves[choice % len(moves)]
        if move == "finish":
            group = sorted(unfinished)[choice // 7 % len(unfinished)]
            buffered[group] = unfinished.pop(group)
        elif move == "land":
            engines = landing.pop(0)
            held -= groups_per_step
        else:
            decision = decide(
                buffered,
                unfinished,
                version=trainer,
                groups_per_step=groups_per_step,
                max_lag=max_lag,
                policy="pace",
            )
            assert not decision.drop
            if decision.take is None:
                assert unfinished or len(buffered) < groups_per_step
                continue
            for group in decision.take:
                assert trainer - buffered.pop(group) <= max_lag
            trainer += 1
            landing.append(trainer)
        waiting = [*buffered.values(), *unfinished.values()]
        assert feasible(waiting, version=trainer, groups_per_step=groups_per_step, max_lag=max_lag)


@given(max_lag=st.integers(0, 8), groups_per_step=st.integers(1, 8))
def test_no_more_groups_than_the_slots_can_be_trained_in_time(max_lag, groups_per_step):
    """Why over-provisioning ends at ``max_lag + 1`` batches: one group more has no step left."""
    ask = {"version": 5, "groups_per_step": groups_per_step, "max_lag": max_lag}
    most = (max_lag + 1) * groups_per_step
    assert feasible([5] * most, **ask)
    assert not feasible([5] * (most + 1), **ask)
