"""Which groups the next step may train: a pure decision over versions.

A group of age ``oldest`` (the version of its oldest token) may be trained by a step that starts from
version ``s`` if ``s - oldest <= max_lag``. Two policies keep that bound:

- ``pace``: no step is taken that would leave some group without a place in time. With ``B`` groups a
  step, a set of groups can all still be trained from version ``s`` on iff for every ``j >= 0`` at
  most ``(j + 1) * B`` of them have ``oldest <= s + j - max_lag`` (earliest deadline first). The
  trainer waits until a step keeps this true, and no group is ever lost to age.
- ``drop``: the step is taken as soon as ``B`` fresh groups are ready; groups that can then no longer
  be trained, finished or not, are dropped at once.

Branch groups and late parts (``parts``) ride along: a step takes every one that is ready, beyond its ``B`` groups, so
they compete with nobody for a place. Under ``pace`` a step is only not taken while one of them is unfinished that it
would make too old.

Why ``pace`` never waits for ever: capacity is ``(max_lag + 1) * B`` slots and a slot is released only
when the engines have the weights of the step that used it, so the condition holds for whatever
is admitted; taking the ``B`` oldest keeps it. A branch group is begun only if the next step could train what it
samples, and ends by itself; so do late attempts. ``tests/unit/runtime/test_staleness.py`` checks this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.runtime.parts import group_of

StalenessPolicy = Literal["pace", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    take: tuple[int, ...] | None
    """Groups of the next batch, in order; None: wait."""
    drop: tuple[int, ...] = ()
    """Groups that no step can train in time any more."""
    waits_for: str = ""
    """What has to happen first, for people."""


def decide(
    buffered: Mapping[int, int],
    unfinished: Mapping[int, int],
    *,
    version: int,
    groups_per_step: int,
    max_lag: int,
    policy: StalenessPolicy,
    branches: Collection[int] = (),
) -> Decision:
    """``buffered`` and ``unfinished`` map a group to the version of its oldest token (a lower bound
    while it is unfinished); ``version`` is that of the weights the next step starts from; ``branches`` are those
    of the groups, or parts of groups, that ride along."""
    late = tuple(sorted(g for g, old in (*buffered.items(), *unfinished.items()) if version - old > max_lag))
    if late:
        return Decision(take=None, drop=late, waits_for="replacements of groups that grew too old")
    riding = [g for g in buffered if g in branches]
    oldest_first = sorted(buffered.keys() - riding, key=lambda g: (buffered[g], g))
    if len(oldest_first) < groups_per_step:
        return Decision(take=None, waits_for=f"{groups_per_step - len(oldest_first)} more finished groups")
    take = tuple(sorted(oldest_first[:groups_per_step] + riding))
    if policy == "pace":
        waiting = {g: old for g, old in unfinished.items() if g not in branches}
        left = [old for g, old in buffered.items() if g not in take] + list(waiting.values())
        fits = feasible(left, version=version + 1, groups_per_step=groups_per_step, max_lag=max_lag)
        late_branches = [g for g in unfinished if g in branches and version + 1 - unfinished[g] > max_lag]
        if late_branches or not fits:
            straggler = min(late_branches or waiting, key=lambda g: (unfinished[g], g))
            text = f"group {group_of(straggler)}, begun at version {unfinished[straggler]}, which would grow too old"
            return Decision(take=None, waits_for=text)
    return Decision(take=take)


def feasible(oldest: Iterable[int], *, version: int, groups_per_step: int, max_lag: int) -> bool:
    """True if groups of these ages can all be trained in time by steps starting from ``version`` on."""
    deadlines = sorted(old + max_lag - version for old in oldest)
    return all(d >= 0 and (i // groups_per_step) <= d for i, d in enumerate(deadlines))
