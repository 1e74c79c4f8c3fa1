"""What the seconds and the counts say: shares, idle shares, goodput and the bottleneck in one line.

In: seconds by activity of every role (``RoleStatus.seconds``), the attempt ledger's counts, and the ``SETTINGS`` that
advice depends on. Out: plain figures and a ``Verdict``. Pure. Invariant: the shares of a role sum to one, so a share
that grows takes from another, and idle time cannot hide.

Idle shares leave out loading: they describe the run once it runs. Device time is that of engines and
trainers; controller and scorers use no device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.timekeeping import SCORING_ACTIVITIES
from headrace.types import RoleStatus

IDLE = frozenset({"idle-no-work", "waiting-for-batch", "waiting"})
SYNC = frozenset({"paused-for-weights", "publishing"})
LOADING = "loading"
HIDDEN_SCORING, EXPOSED_SCORING, _ = SCORING_ACTIVITIES

NOTABLE = 0.15
"""A share below this is the ordinary slack between two loops that are never exactly in step."""
COSTLY_SYNC = 0.2
COSTLY_DROPS = 0.1


SETTINGS = ("run.launcher", "rollout.max_lag", "rollout.over_provision", "weights.mode")
"""What ``judge`` is told of the run's settings, so that it advises nothing that is so already."""

SOURCES = {
    "outcome": ("the reward functions", "make them faster, or raise reward.workers"),
    "reference": (
        "the reference",
        'where the KL term is in the loss, set "kl.reference" in algo.options to trainer',
    ),
    "teacher": ("a teacher", "name smaller ones in distill.teachers"),
    "process": ("the judge of steps", "name a faster one in scoring.process"),
}
"""By source of the scoring stage, what people call it and what helps when it is slow."""
_EXPOSED = "_exposed_s"
_BUSY_SOURCES = {"scorer": "outcome", "reference": "reference", "teacher": "teacher", "process": "process"}
"""The source that a kind of role answers for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    bottleneck: str
    """``trainer``, ``generation``, ``scoring``, ``weight-sync``, ``controller``, ``launcher``, ``lag``, ``none`` or
    ``unknown``."""
    text: str
    """One line: what is short, by how much, and what to change."""


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each activity's share of a role's time; they sum to 1. Empty while no time has passed."""
    age_s = sum(seconds.values())
    return {activity: spent / age_s for activity, spent in seconds.items()} if age_s > 0 else {}


def percentages(parts: Mapping[str, float]) -> dict[str, float]:
    """Parts as percent with one decimal that sum to exactly 100: the largest remainders are rounded up."""
    total = sum(parts.values())
    if total <= 0:
        return dict.fromkeys(parts, 0.0)
    exact = {name: 1000 * part / total for name, part in parts.items()}
    tenths = {name: int(value) for name, value in exact.items()}
    short = 1000 - sum(tenths.values())
    for name in sorted(exact, key=lambda n: tenths[n] - exact[n])[:short]:
        tenths[name] += 1
    return {name: value / 10 for name, value in tenths.items()}


def idle_share(seconds: Mapping[str, float]) -> float:
    """Share of the time since loading in which the role had nothing to do."""
    return _share_since_loading(seconds, IDLE)


def sync_share(seconds: Mapping[str, float]) -> float:
    """Share of the time since loading that went into weights on their way."""
    return _share_since_loading(seconds, SYNC)


def scoring_seconds(seconds: Mapping[str, float]) -> float:
    """Of the scoring stage's time, what went into scores."""
    return seconds.get(HIDDEN_SCORING, 0.0) + seconds.get(EXPOSED_SCORING, 0.0)


def hidden_share(seconds: Mapping[str, float]) -> float:
    """Of the time that went into scores, the share in which attempts were being generated; 1 where none did."""
    spent = scoring_seconds(seconds)
    return seconds.get(HIDDEN_SCORING, 0.0) / spent if spent > 0 else 1.0


_ON_DEVICES = ("engine", "reference", "teacher", "trainer")


def kind(role: str) -> str:
    """``engine`` of ``engine-0``."""
    return role.partition("-")[0]


def device_seconds(roles: Sequence[RoleStatus]) -> float:
    return sum(sum(role.seconds.values()) for role in roles if kind(role.role) in _ON_DEVICES)


def goodput(tokens_by_state: Mapping[str, int], roles: Sequence[RoleStatus]) -> float:
    """Trained tokens per device-second. Trained tokens are fresh: stale ones were dropped instead."""
    spent_s = device_seconds(roles)
    return tokens_by_state.get("trained", 0) / spent_s if spent_s > 0 else 0.0


def drop_shares(tokens_by_state: Mapping[str, int]) -> dict[str, float]:
    """By reason, the share of the tokens of ended attempts that were dropped for it."""
    ended = {s: n for s, n in tokens_by_state.items() if s == "trained" or s.startswith("dropped:")}
    total = sum(ended.values())
    if total == 0:
        return {}
    return {s.removeprefix("dropped:"): n / total for s, n in ended.items() if s != "trained" and n > 0}


def judge(
    roles: Sequence[RoleStatus],
    tokens_by_state: Mapping[str, int],
    settings: Mapping[str, Any] | None = None,
) -> Verdict:
    """The bottleneck and what to change. ``settings``: ``SETTINGS`` by name; one that is not there is not known."""
    by_kind = _mean_shares(roles)
    if "engine" not in by_kind or "trainer" not in by_kind:
        return Verdict(bottleneck="unknown", text="no verdict: engine and trainer have reported no time yet")
    verdict = _bottleneck(by_kind, _exposed_sources(roles), settings or {})
    losses = _loss_text(tokens_by_state)
    return Verdict(bottleneck=verdict.bottleneck, text=verdict.text + losses)


def _bottleneck(
    by_kind: Mapping[str, tuple[float, float]], exposed: Mapping[str, float], settings: Mapping[str, Any]
) -> Verdict:
    engine_idle, engine_sync = by_kind["engine"]
    trainer_idle, trainer_sync = by_kind["trainer"]
    if max(engine_sync, trainer_sync) > COSTLY_SYNC:
        swap = "" if settings.get("weights.mode") == "never" else "set weights.mode to never, or "
        return Verdict(
            bottleneck="weight-sync",
            text=f"weight-sync-bound: weights take {engine_sync:.0%} of engine and {trainer_sync:.0%} "
            f"of trainer time; {swap}raise rollout.groups_per_step, so that they change less often",
        )
    waits = f"engines idle {engine_idle:.0%}, trainer idle {trainer_idle:.0%}"
    if engine_idle <= NOTABLE and trainer_idle <= NOTABLE:
        return Verdict(bottleneck="none", text=f"balanced: {waits}; more speed needs more of both")
    if trainer_idle <= NOTABLE:
        return Verdict(
            bottleneck="trainer",
            text=f"trainer-bound: {waits}; give the trainer more devices (trainer.ranks), or generation fewer "
            "(engine.count)",
        )
    if engine_idle <= NOTABLE:
        return Verdict(
            bottleneck="generation",
            text=f"generation-bound: {waits}; raise engine.count, or shorten completions (rollout.max_tokens)",
        )
    return _both_wait(waits, by_kind, exposed, settings)


def _both_wait(
    waits: str,
    by_kind: Mapping[str, tuple[float, float]],
    exposed: Mapping[str, float],
    settings: Mapping[str, Any],
) -> Verdict:
    """What engines and trainer both wait for."""
    source = _slow_source(by_kind, exposed)
    if source is not None:
        who, remedy = SOURCES.get(source, (source, "make it faster"))
        return Verdict(
            bottleneck="scoring", text=f"scoring-bound: {waits} while attempts wait for {who}; {remedy}"
        )
    if settings.get("run.launcher") == "inline":
        return Verdict(
            bottleneck="launcher",
            text=f"launcher-bound: {waits}: run.launcher = inline runs them in turn; local runs them at once",
        )
    if "controller" in by_kind and by_kind["controller"][0] < 0.5:
        return Verdict(
            bottleneck="controller",
            text=f"controller-bound: {waits}, and the controller works {1 - by_kind['controller'][0]:.0%} of the "
            "time; attempts are short for its bookkeeping: give it a core of its own, or longer completions",
        )
    return Verdict(
        bottleneck="lag", text=f"lag-bound: {waits}, each waits for the other; {_more_under_way(settings)}"
    )


def _more_under_way(settings: Mapping[str, Any]) -> str:
    """The setting that bounds how many groups are under way."""
    max_lag, batches = settings.get("rollout.max_lag"), settings.get("rollout.over_provision")
    if max_lag is None:
        return "raise rollout.max_lag"
    if batches is not None and batches < max_lag + 1:
        return f"raise rollout.over_provision (it is {batches:g})"
    return f"raise rollout.max_lag (it is {max_lag}{', which is synchronous' if max_lag == 0 else ''})"


def _slow_source(by_kind: Mapping[str, tuple[float, float]], exposed: Mapping[str, float]) -> str | None:
    """The source of scores that both wait for; None: they wait for something else."""
    for role, source in _BUSY_SOURCES.items():
        if role in by_kind and by_kind[role][0] <= NOTABLE:
            return source
    both_idle = min(by_kind["engine"][0], by_kind["trainer"][0])
    slowest = max(exposed, key=lambda source: exposed[source], default=None)
    return slowest if slowest is not None and exposed[slowest] >= both_idle / 2 else None


def _exposed_sources(roles: Sequence[RoleStatus]) -> dict[str, float]:
    """By source of scores, the share of the time in which it was asked and nothing was generated."""
    for role in roles:
        age_s = sum(role.seconds.values())
        if role.role == "scoring" and age_s > 0:
            named = {
                name.removesuffix(_EXPOSED): n for name, n in role.counters.items() if name.endswith(_EXPOSED)
            }
            return {source: spent / age_s for source, spent in named.items()}
    return {}


def _loss_text(tokens_by_state: Mapping[str, int]) -> str:
    # What is still running at the end is cancelled; that is the price of ending, not of any setting.
    lost = drop_shares({state: n for state, n in tokens_by_state.items() if state != "dropped:cancelled"})
    if not lost or sum(lost.values()) <= COSTLY_DROPS:
        return ""
    worst = max(lost, key=lambda reason: lost[reason])
    remedy = {
        "stale": "set rollout.staleness to pace, or raise rollout.max_lag",
        "zero-variance": "choose tasks that are neither solved nor hopeless, or raise rollout.group_size",
        "over-length": "raise rollout.max_tokens",
        "wide-mask": "set rollout.top_k, or lower rollout.top_p",
        "failed": "see the drop events for the cause",
    }
    return (
        f"; {sum(lost.values()):.0%} of tokens dropped, mostly {worst}: {remedy.get(worst, remedy['failed'])}"
    )


def _mean_shares(roles: Sequence[RoleStatus]) -> dict[str, tuple[float, float]]:
    """(idle, sync) share by kind of role, averaged over those that are past loading."""
    grouped: dict[str, list[tuple[float, float]]] = {}
    for role in roles:
        if sum(role.seconds.values()) - role.seconds.get(LOADING, 0.0) > 0:
            figures = (idle_share(role.seconds), sync_share(role.seconds))
            grouped.setdefault(kind(role.role), []).append(figures)
    return {
        name: (sum(i for i, _ in f) / len(f), sum(s for _, s in f) / len(f)) for name, f in grouped.items()
    }


def _share_since_loading(seconds: Mapping[str, float], activities: frozenset[str]) -> float:
    ran_s = sum(seconds.values()) - seconds.get(LOADING, 0.0)
    return (
        sum(spent for activity, spent in seconds.items() if activity in activities) / ran_s
        if ran_s > 0
        else 0.0
    )
