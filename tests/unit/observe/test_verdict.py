from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.names import FIELDS
from headrace.observe.verdict import (
    SETTINGS,
    SOURCES,
    drop_shares,
    goodput,
    hidden_share,
    idle_share,
    judge,
    percentages,
    shares,
)
from headrace.types import DropReason, RoleStatus

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


def scoring(exposed: float, **sources: float) -> RoleStatus:
    """The scoring stage: its exposed share, and of each source the share in which it was asked and exposed."""
    seconds = {"scoring-exposed": 100 * exposed, "idle-no-work": 100 * (1 - exposed)}
    counters = {f"{source}_exposed_s": 100 * share for source, share in sources.items()}
    return RoleStatus(role="scoring", version=0, progress=0, seconds=seconds, counters=counters)


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
    ("roles", "bottleneck", "words"),
    [
        (
            [engine(0.4), trainer(0.05)],
            "trainer",
            ["trainer-bound", "engines idle 40%", "trainer idle 5%", "trainer.ranks", "engine.count"],
        ),
        (
            [engine(0.05), trainer(0.4)],
            "generation",
            ["generation-bound", "engine.count", "rollout.max_tokens"],
        ),
        ([engine(0.05), trainer(0.05)], "none", ["balanced"]),
        ([engine(0.5), trainer(0.5)], "lag", ["raise rollout.max_lag"]),
        ([engine(0.5), trainer(0.5), role("scorer-0", scoring=9, waiting=1)], "scoring", ["reward.workers"]),
        ([engine(0.5), trainer(0.5), role("scorer-0", scoring=1, waiting=9)], "lag", []),
        (
            [engine(0.1, paused=0.3), trainer(0.1)],
            "weight-sync",
            ["30% of engine", "rollout.groups_per_step"],
        ),
        ([engine(0.3), trainer(0.1, publishing=0.25)], "weight-sync", ["25% of trainer"]),
        ([engine(0.0), engine(0.5, name="engine-1"), trainer(0.0)], "trainer", ["engines idle 25%"]),
        ([engine(0.5)], "unknown", ["no verdict"]),
        ([role("engine-0", loading=3.0), trainer(0.1)], "unknown", []),
    ],
)
def test_bottlenecks(roles: list[RoleStatus], bottleneck: str, words: list[str]) -> None:
    verdict = judge(roles, {"trained": 1000})
    assert verdict.bottleneck == bottleneck
    for word in words:
        assert word in verdict.text
    assert "launcher" not in verdict.text
    assert "dropped" not in verdict.text and "\n" not in verdict.text


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (scoring(0.4, outcome=0.4), ["the reward functions", "reward.workers"]),
        (scoring(0.4, outcome=0.1, reference=0.4), ["the reference", '"kl.reference" in algo.options']),
        (scoring(0.4, outcome=0.1, teacher=0.4), ["a teacher", "distill.teachers"]),
        (scoring(0.4, outcome=0.1, process=0.4), ["the judge of steps", "scoring.process"]),
        (scoring(0.4, outcome=0.1, oracle=0.4), ["attempts wait for oracle"]),
        # An engine that does nothing but score, and is never idle.
        (role("reference", prefill=95, idle_no_work=5), ["the reference"]),
        (role("teacher-wise", prefill=95, idle_no_work=5), ["a teacher"]),
    ],
)
def test_the_slow_source_of_scores_is_named(stage: RoleStatus, words: list[str]) -> None:
    verdict = judge([engine(0.5), trainer(0.6), stage], {})
    assert verdict.bottleneck == "scoring"
    for word in words:
        assert word in verdict.text
    assert ("reward" in verdict.text) == ("reward.workers" in words)


def test_scores_that_take_little_of_what_both_wait_are_not_the_bottleneck() -> None:
    assert judge([engine(0.5), trainer(0.6), scoring(0.2, outcome=0.2)], {}).bottleneck == "lag"


@pytest.mark.parametrize(
    ("settings", "bottleneck", "advice"),
    [
        ({"run.launcher": "inline", "rollout.max_lag": 1}, "launcher", "local runs them at once"),
        ({"run.launcher": "local", "rollout.max_lag": 1}, "lag", "raise rollout.max_lag (it is 1)"),
        ({"rollout.max_lag": 0}, "lag", "raise rollout.max_lag (it is 0, which is synchronous)"),
        (
            {"rollout.max_lag": 3, "rollout.over_provision": 1.5},
            "lag",
            "raise rollout.over_provision (it is 1.5)",
        ),
        ({"rollout.max_lag": 1, "rollout.over_provision": 2.0}, "lag", "raise rollout.max_lag (it is 1)"),
    ],
)
def test_advice_depends_on_what_is_set(settings: dict[str, Any], bottleneck: str, advice: str) -> None:
    verdict = judge([engine(0.5), trainer(0.5)], {}, settings)
    assert verdict.bottleneck == bottleneck
    assert verdict.text.endswith(advice)


@pytest.mark.parametrize(("mode", "is_advised"), [("block", True), ("never", False)])
def test_weights_that_already_land_without_a_stop_are_not_told_to(mode: str, is_advised: bool) -> None:
    text = judge([engine(0.1, paused=0.3), trainer(0.1)], {}, {"weights.mode": mode}).text
    assert ("set weights.mode to never" in text) == is_advised


def test_whatever_looks_like_a_setting_is_one() -> None:
    dropped = [f"dropped:{reason}" for reason in get_args(DropReason)]
    roles = [
        [engine(0.5), trainer(0.5)],
        [engine(0.5), trainer(0.05)],
        [engine(0.05), trainer(0.5)],
        [engine(0.1, paused=0.3), trainer(0.1)],
        *([engine(0.5), trainer(0.5), scoring(0.5, **{source: 0.5})] for source in SOURCES),
    ]
    texts = [judge(each, {state: 1}).text for each in roles for state in dropped]
    texts += [judge(roles[0], {}, {"run.launcher": "inline"}).text]
    named = {name for text in texts for name in re.findall(r"(?<![\"\w])[a-z]+\.[a-z_]+", text)}
    assert len(named) > 10
    assert named | set(SETTINGS) <= set(FIELDS)


def test_heavy_drops_are_part_of_the_verdict() -> None:
    roles = [engine(0.05), trainer(0.05)]
    heavy = judge(roles, {"trained": 70, "dropped:stale": 25, "dropped:failed": 5})
    assert heavy.bottleneck == "none"
    assert "30% of tokens dropped, mostly stale: set rollout.staleness to pace" in heavy.text
    assert "dropped" not in judge(roles, {"trained": 95, "dropped:stale": 5}).text
    assert "dropped" not in judge(roles, {"trained": 50, "dropped:cancelled": 50}).text


def test_a_controller_that_works_most_of_the_time_is_named() -> None:
    idle = [engine(idle=0.5), trainer(idle=0.5)]
    assert judge([*idle, role("controller", working=30, waiting=70)], {}).bottleneck == "lag"
    assert judge([*idle, role("controller", working=70, waiting=30)], {}).bottleneck == "controller"


def test_the_hidden_share_is_of_the_time_that_went_into_scores():
    assert hidden_share({"scoring-hidden": 9.0, "scoring-exposed": 1.0, "idle-no-work": 90.0}) == 0.9
    assert hidden_share({"idle-no-work": 5.0}) == 1.0
