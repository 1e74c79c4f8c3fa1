from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.verdict import (
    drop_shares,
    goodput,
    hidden_share,
    idle_share,
    judge,
    percentages,
    shares,
)
from headrace.types import RoleStatus

SECONDS = st.dictionaries(
    st.sampled_from(["loading", "decode", "prefill", "idle-no-work", "paused-for-weights"]),
    st.floats(0, 1e6, allow_subnormal=False),
    min_size=1,
)


def role(name: str, **seconds: float) -> RoleStatus:
    by_activity = {key.replace("_", "-"): value for key, value in seconds.items()}
    return RoleStatus(role=name, version=0, progress=0, seconds=by_activity)


def engine(idle: float, paused: float = 0.0, name: str = "engine-0") -> RoleStatus:
    return role(
        name,
        loading=50,
        decode=100 * (1 - idle - paused),
        idle_no_work=100 * idle,
        paused_for_weights=100 * paused,
    )


def trainer(idle: float, publishing: float = 0.0) -> RoleStatus:
    busy = 100 * (1 - idle - publishing)
    return role(
        "trainer",
        loading=20,
        forward_backward=busy,
        waiting_for_batch=100 * idle,
        publishing=100 * publishing,
    )


@given(SECONDS)
def test_shares_sum_to_one(seconds: dict[str, float]) -> None:
    if sum(seconds.values()) > 0:
        assert sum(shares(seconds).values()) == pytest.approx(1.0)
        assert 0 <= idle_share(seconds) <= 1 + 1e-9
    else:
        assert shares(seconds) == {}


@given(SECONDS)
def test_percentages_sum_to_exactly_one_hundred(seconds: dict[str, float]) -> None:
    parts = percentages(seconds)
    total = sum(seconds.values())
    assert round(sum(parts.values()), 6) == (100.0 if total > 0 else 0.0)
    for activity, part in parts.items():
        assert part == pytest.approx(100 * seconds[activity] / total if total else 0.0, abs=0.1001)


def test_idle_share_leaves_out_loading() -> None:
    assert idle_share({"loading": 90.0, "decode": 5.0, "idle-no-work": 5.0}) == 0.5
    assert idle_share({"loading": 90.0}) == 0.0


def test_goodput_counts_trained_tokens_over_device_seconds() -> None:
    roles = [
        role("engine-0", decode=30.0),
        role("trainer", optimizer=20.0),
        role("controller", waiting=1000.0),
    ]
    assert goodput({"trained": 500, "dropped:stale": 300, "buffered": 9}, roles) == 10.0
    assert goodput({"trained": 500}, []) == 0.0


def test_drop_shares_are_of_ended_tokens() -> None:
    assert drop_shares({"trained": 60, "dropped:stale": 30, "dropped:failed": 10, "generating": 900}) == {
        "stale": 0.3,
        "failed": 0.1,
    }
    assert drop_shares({"generating": 4}) == {}


@pytest.mark.parametrize(
    ("roles", "mean_attempts", "bottleneck", "words"),
    [
        (
            [engine(0.4), trainer(0.05)],
            {},
            "trainer",
            ["trainer-bound", "engines idle 40%", "trainer idle 5%"],
        ),
        ([engine(0.05), trainer(0.4)], {}, "generation", ["generation-bound", "add engines"]),
        ([engine(0.05), trainer(0.05)], {}, "none", ["balanced"]),
        ([engine(0.5), trainer(0.5)], {}, "lag", ["max_lag"]),
        ([engine(0.5), trainer(0.5)], {"scoring": 9.0, "generating": 1.0}, "scoring", ["reward"]),
        ([engine(0.5), trainer(0.5)], {"scoring": 1.0, "generating": 9.0}, "lag", ["max_lag"]),
        (
            [engine(0.5), trainer(0.5), role("scorer-0", scoring=9, waiting=1)],
            {},
            "scoring",
            ["scoring-bound"],
        ),
        ([engine(0.5), trainer(0.5), role("scorer-0", scoring=1, waiting=9)], {}, "lag", []),
        ([engine(0.1, paused=0.3), trainer(0.1)], {}, "weight-sync", ["30% of engine"]),
        ([engine(0.3), trainer(0.1, publishing=0.25)], {}, "weight-sync", ["25% of trainer"]),
        ([engine(0.0), engine(0.5, name="engine-1"), trainer(0.0)], {}, "trainer", ["engines idle 25%"]),
        ([engine(0.5)], {}, "unknown", ["no verdict"]),
        ([role("engine-0", loading=3.0), trainer(0.1)], {}, "unknown", []),
    ],
)
def test_bottlenecks(
    roles: list[RoleStatus], mean_attempts: dict[str, float], bottleneck: str, words: list[str]
) -> None:
    verdict = judge(roles, {"trained": 1000}, mean_attempts)
    assert verdict.bottleneck == bottleneck
    for word in words:
        assert word in verdict.text
    assert "dropped" not in verdict.text and "\n" not in verdict.text


def test_heavy_drops_are_part_of_the_verdict() -> None:
    roles = [engine(0.05), trainer(0.05)]
    heavy = judge(roles, {"trained": 70, "dropped:stale": 25, "dropped:failed": 5})
    assert heavy.bottleneck == "none"
    assert "30% of tokens dropped, mostly stale: set staleness to pace" in heavy.text
    assert "dropped" not in judge(roles, {"trained": 95, "dropped:stale": 5}).text
    assert "dropped" not in judge(roles, {"trained": 50, "dropped:cancelled": 50}).text


def test_a_controller_that_works_most_of_the_time_is_named() -> None:
    idle = [engine(idle=0.5), trainer(idle=0.5)]
    assert judge([*idle, role("controller", working=30, waiting=70)], {}).bottleneck == "lag"
    assert judge([*idle, role("controller", working=70, waiting=30)], {}).bottleneck == "controller"


def test_the_hidden_share_is_of_the_time_that_went_into_scores():
    assert hidden_share({"scoring-hidden": 9.0, "scoring-exposed": 1.0, "idle-no-work": 90.0}) == 0.9
    assert hidden_share({"idle-no-work": 5.0}) == 1.0
