"""The controller's memory: a fold over the journal.

``RunState.apply(record)`` is the only thing that changes it, live and in recovery alike, so what a
killed controller knew is what its successor reads back. The record kinds:

    admit    {group, task, attempts, version}      a group takes a slot
    tokens   {group, attempt, turn, more}          an unfinished turn grew by the completion ``more``
    turn     {group, attempt, turn, value}         a turn is finished: a ``Turn`` whose completion holds
                                                   only what ``tokens`` records have not said yet
    episode  {group, attempt, trajectories}        an attempt is finished; a trajectory is a list of its turns
                                                   by number, text, policy and trainable, and where it has them
                                                   its own reward and its peers
    scores   {columns}                             a source has said something of these attempts
    again    {source, why}                         a question failed while its attempt went on; it is put once more
    scored   {group, returns, missing, attempts}   these attempts (left out: all) wait for their batch; ``missing``
                                                   lists what they go without, as (source, attempt, why)
    pivots   {tasks, room}                         points inside failed attempts of a group, for branch groups
    explored {depth, success}                      how a branch group that began at this depth ended
    drop     {group, reason, detail}               a group ends untrained
    take     {step, groups}                        a step begins to train these groups
    trained  {step, version, groups, means}        ... and has; its slots are held until the weights arrive. ``means``,
                                                   where running means are kept: those the next step compares with

In the last three a group that was released with a quorum of its attempts is named by its part (``parts``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.data import completions
from headrace.data.steps import PROCESS, continued, in_order
from headrace.errors import InvariantError
from headrace.runtime.ledger import AttemptLedger
from headrace.runtime.parts import group_of, is_late, late_part
from headrace.runtime.pivots import PivotMemory
from headrace.types import (
    Completion,
    Episode,
    EpisodeGroup,
    ScoreColumn,
    Task,
    TeacherScores,
    Trajectory,
    Turn,
)

REFERENCE = "reference"
"""The source whose log-probabilities become those of the reference policy."""
TEACHER = "teacher"
"""The source that is imitated."""


@dataclass(slots=True)
class LiveGroup:
    """A group between admission and its end."""

    group: int
    task: Task
    num_attempts: int
    version: int
    """A lower bound for its oldest token: the weights the engines had when it was admitted."""
    turns: dict[int, list[Turn]] = field(default_factory=dict)
    """Finished turns by attempt."""
    unfinished: dict[int, Completion] = field(default_factory=dict)
    """What the running turn of an attempt has sampled so far."""
    episodes: dict[int, Episode] = field(default_factory=dict)
    turn_order: dict[int, list[int]] = field(default_factory=dict)
    """By attempt, the numbers of its turns as its trajectories have them, where that is not the order of sampling."""
    columns: dict[str, dict[int, ScoreColumn]] = field(default_factory=dict)
    """What has been said of its attempts, by source and attempt."""
    scored: EpisodeGroup | None = None
    """Its first part, until that has ended."""
    quorum: list[int] = field(default_factory=list)
    """Attempts of the first part; none: it is not scored yet."""
    frozen: list[float] = field(default_factory=list)
    """Their returns, which late attempts are compared with."""
    late: EpisodeGroup | None = None
    """The attempts that ended after the quorum was released, once they are scored."""
    late_ended: bool = False

    def attempts(self, part: int) -> list[int]:
        everyone = range(self.num_attempts)
        if is_late(part):
            return [a for a in everyone if a not in self.quorum]
        return self.quorum or list(everyone)

    def scored_part(self, part: int) -> EpisodeGroup | None:
        return self.late if is_late(part) else self.scored

    @property
    def is_first_open(self) -> bool:
        """Its first part still waits for its step."""
        return not self.quorum or self.scored is not None

    @property
    def is_late_open(self) -> bool:
        """There are attempts that its quorum did not wait for, and they still wait for their step."""
        return 0 < len(self.quorum) < self.num_attempts and not self.late_ended

    @property
    def parts(self) -> list[int]:
        """Those that have not ended."""
        return [self.group] * self.is_first_open + [late_part(self.group)] * self.is_late_open

    @property
    def unscored(self) -> int | None:
        """The part that attempts still run for; None: all are scored."""
        if not self.quorum:
            return self.group
        return late_part(self.group) if self.late is None and self.is_late_open else None

    @property
    def is_branch(self) -> bool:
        """Its attempts go on from a pivot inside an earlier one."""
        return self.task.pivot is not None

    def num_sampled(self, attempt: int) -> int:
        """Tokens of its finished turns, also of those that are in no trajectory."""
        return sum(turn.completion.num_tokens for turn in self.turns.get(attempt, ()))

    def rewards(self, attempts: Sequence[int]) -> list[dict[str, float | None]]:
        """What all sources together give each of these attempts as a whole."""
        given: list[dict[str, float | None]] = [{} for _ in attempts]
        for _, of_source in sorted(self.columns.items()):
            for attempt, rewards in zip(attempts, given, strict=True):
                if attempt in of_source:
                    rewards.update(of_source[attempt].rewards)
        return given


@dataclass(slots=True)
class RunState:
    step: int = 0
    """Last step trained."""
    version: int = 0
    next_group: int = 0
    num_trained_groups: int = 0
    """Branch groups not counted."""
    means: dict[str, float] = field(default_factory=dict)
    """Running mean of what each agent earned, where the advantage compares with it."""
    pivots: PivotMemory = field(default_factory=PivotMemory)
    ledger: AttemptLedger = field(default_factory=AttemptLedger)
    groups: dict[int, LiveGroup] = field(default_factory=dict)
    missing_scores: dict[str, int] = field(default_factory=dict)
    """Scores that attempts went without, by ``<source>: <why>``."""
    asked_again: dict[str, int] = field(default_factory=dict)
    """Questions that failed while their attempt went on and were put again at its end, likewise."""
    num_given_up: int = 0
    """Attempts that were ended early because their steps looked hopeless."""
    progress: int = 0
    """Records applied; a run that is alive moves it."""

    @property
    def next_task(self) -> int:
        """The task cursor: every group takes the next task of the source, but branch groups take none."""
        return self.next_group - self.pivots.num_groups

    def apply(self, record: dict[str, Any]) -> None:
        handler = _HANDLERS[record["kind"]]
        handler(self, record)
        self.progress += 1

    def snapshot(self) -> dict[str, Any]:
        """The whole state as values of the data contract."""
        return {
            "step": self.step,
            "version": self.version,
            "next_group": self.next_group,
            "num_trained_groups": self.num_trained_groups,
            "means": dict(self.means),
            "pivots": self.pivots.snapshot(),
            "missing_scores": dict(self.missing_scores),
            "asked_again": dict(self.asked_again),
            "num_given_up": self.num_given_up,
            "ledger": self.ledger.snapshot(),
            "groups": [
                {name: getattr(group, name) for name in LiveGroup.__dataclass_fields__}
                for group in self.groups.values()
            ],
        }

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> RunState:
        groups = [LiveGroup(**fields) for fields in snapshot["groups"]]
        plain = {k: v for k, v in snapshot.items() if k not in ("pivots", "ledger", "groups")}
        return cls(
            **plain,
            pivots=PivotMemory.restore(snapshot["pivots"]),
            ledger=AttemptLedger.restore(snapshot["ledger"]),
            groups={group.group: group for group in groups},
        )

    def live(self, group: int) -> LiveGroup:
        try:
            return self.groups[group]
        except KeyError:
            raise InvariantError(f"group {group} is not live") from None

    def live_part(self, part: int) -> LiveGroup:
        """The group that a part belongs to."""
        return self.live(group_of(part))

    def end(self, part: int) -> None:
        """A part was trained or dropped; the group is forgotten with its last one."""
        live = self.live_part(part)
        if is_late(part):
            live.late, live.late_ended = None, True
        else:
            live.scored = None
        if not live.quorum or not live.parts:
            del self.groups[live.group]


def _admit(state: RunState, r: dict[str, Any]) -> None:
    group = r["group"]
    if group != state.next_group:
        raise InvariantError(f"group {group} was admitted out of turn; {state.next_group} is next")
    state.ledger.admit(group, r["attempts"])
    state.groups[group] = LiveGroup(group, r["task"], r["attempts"], r["version"])
    state.next_group += 1
    if state.groups[group].is_branch:
        state.pivots.begun(r["task"])


def _tokens(state: RunState, r: dict[str, Any]) -> None:
    live, attempt, more = state.live(r["group"]), r["attempt"], r["more"]
    if r["turn"] != len(live.turns.get(attempt, ())):
        raise InvariantError(f"tokens of turn {r['turn']} of attempt {(live.group, attempt)}: out of turn")
    state.ledger.sampled(live.group, attempt, more.num_tokens)
    live.unfinished[attempt] = completions.join(live.unfinished.get(attempt, completions.EMPTY), more)


def _turn(state: RunState, r: dict[str, Any]) -> None:
    live, attempt, turn = state.live(r["group"]), r["attempt"], r["value"]
    done = live.turns.setdefault(attempt, [])
    if r["turn"] != len(done):
        raise InvariantError(f"turn {r['turn']} of attempt {(live.group, attempt)} is out of turn")
    state.ledger.sampled(live.group, attempt, turn.completion.num_tokens)
    known = live.unfinished.pop(attempt, None)
    done.append(turn if known is None else _continuing(known, turn))


def _continuing(known: Completion, turn: Turn) -> Turn:
    """The whole turn; spelt out as in ``_with_rewards``."""
    return Turn(
        prompt_ids=turn.prompt_ids,
        completion=completions.join(known, turn.completion),
        sampling=turn.sampling,
        seed=turn.seed,
        engine=turn.engine,
    )


def _episode(state: RunState, r: dict[str, Any]) -> None:
    live, attempt = state.live(r["group"]), r["attempt"]
    state.ledger.move(live.group, (attempt,), "generating", "scoring")
    turns = live.turns.get(attempt, [])
    state.num_given_up += "abort" in [turn.completion.finish_reason for turn in turns]
    trajectories = [
        Trajectory(
            turns=tuple([turns[i] for i in numbers]),
            text=text,
            policy=policy,
            trainable=trainable,
            **_own(own),
        )
        for numbers, text, policy, trainable, *own in r["trajectories"]
    ]
    live.episodes[attempt] = Episode(
        group=live.group, attempt=attempt, task=live.task, trajectories=tuple(trajectories)
    )
    order = [number for numbers, *_ in r["trajectories"] for number in numbers]
    if order != list(range(len(turns))):
        live.turn_order[attempt] = order


def _own(told: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(("own_reward", "peers"), told, strict=bool(told)))


def _scores(state: RunState, r: dict[str, Any]) -> None:
    for column in r["columns"]:
        of_source = state.live(column.group).columns.setdefault(column.source, {})
        known = of_source.get(column.attempt)
        of_source[column.attempt] = column if known is None else _continued(known, column)


def _continued(known: ScoreColumn, more: ScoreColumn) -> ScoreColumn:
    """Steps are told as they end; anything else is said once."""
    if known.step_ends is None or more.step_ends is None:
        raise InvariantError(f"{more.source} scored attempt {(more.group, more.attempt)} twice")
    return continued(known, more)


def _scored(state: RunState, r: dict[str, Any]) -> None:
    live = state.live(r["group"])
    attempts = list(r.get("attempts", range(live.num_attempts)))
    state.ledger.move(live.group, attempts, "scoring", "buffered")
    scored = _bound(live, attempts, r["returns"])
    if live.quorum:
        live.late = scored
    else:
        live.scored, live.quorum, live.frozen = scored, attempts, list(r["returns"])
    for source, _, why in r["missing"]:
        _count(state.missing_scores, source, why)


def _again(state: RunState, r: dict[str, Any]) -> None:
    _count(state.asked_again, r["source"], r["why"])


def _count(faults: dict[str, int], source: str, why: str) -> None:
    name = f"{source}: {why}"
    faults[name] = faults.get(name, 0) + 1


def _bound(live: LiveGroup, attempts: list[int], returns: list[float]) -> EpisodeGroup:
    """These attempts with all that was said of them, which the live group then lets go: keeping them twice would
    double the checkpoint."""
    rewards = live.rewards(attempts)
    episodes = [
        _with_rewards(live.episodes.pop(a), given) for a, given in zip(attempts, rewards, strict=True)
    ]
    said = {
        source: {a: _ordered(live, of_source.pop(a)) for a in attempts if a in of_source}
        for source, of_source in sorted(live.columns.items())
    }
    for attempt in attempts:
        live.turns.pop(attempt, None)
        live.turn_order.pop(attempt, None)
    live.columns = {source: of_source for source, of_source in live.columns.items() if of_source}
    references, taught = said.pop(REFERENCE, None), said.pop(TEACHER, None)
    columns = [of_source[a] for of_source in said.values() for a in sorted(of_source)]
    return EpisodeGroup(
        group=live.group,
        task=live.task,
        episodes=tuple(episodes),
        returns=tuple(returns),
        ref_logprobs=_of_samples(references) if references else None,
        teacher=_taught(taught) if taught else None,
        # Rewards are with the episodes, but not who gave them.
        scores=tuple(
            [c for c in columns if any(x is not None for x in (c.step_ends, c.logprobs, c.versions))]
        ),
    )


def _ordered(live: LiveGroup, column: ScoreColumn) -> ScoreColumn:
    """The process judge is told of turns as they are sampled; its steps follow them to their trajectories."""
    order = live.turn_order.get(column.attempt)
    if order is None or column.source != PROCESS or column.step_ends is None:
        return column
    return in_order(column, [turn.completion.num_tokens for turn in live.turns[column.attempt]], order)


def _taught(columns: dict[int, ScoreColumn]) -> tuple[TeacherScores, ...] | None:
    """As ``_of_samples``; None: the task has no teacher."""
    said = [columns[attempt].teacher for attempt in sorted(columns)]
    return None if None in said else tuple([scores for of_attempt in said for scores in of_attempt or ()])


def _of_samples(columns: dict[int, ScoreColumn]) -> tuple[np.ndarray, ...]:
    """In the order of a group's samples, which is that of its attempts."""
    return tuple([logprobs for attempt in sorted(columns) for logprobs in columns[attempt].logprobs or ()])


def _with_rewards(episode: Episode, rewards: dict[str, float | None]) -> Episode:
    first, *others = episode.trajectories
    # Spelt out: ``replace`` would take three times as long, for every attempt there is.
    scored = Trajectory(
        turns=first.turns,
        text=first.text,
        rewards=rewards,
        policy=first.policy,
        trainable=first.trainable,
        own_reward=first.own_reward,
        peers=first.peers,
    )
    return Episode(
        group=episode.group, attempt=episode.attempt, task=episode.task, trajectories=(scored, *others)
    )


def _pivots(state: RunState, r: dict[str, Any]) -> None:
    state.pivots.found(r["tasks"], r["room"])


def _explored(state: RunState, r: dict[str, Any]) -> None:
    state.pivots.explored(r["depth"], r["success"])


def _drop(state: RunState, r: dict[str, Any]) -> None:
    live = state.live_part(r["group"])
    state.ledger.drop(live.group, live.attempts(r["group"]), r["reason"])
    state.end(r["group"])


def _take(state: RunState, r: dict[str, Any]) -> None:
    for part in r["groups"]:
        live = state.live_part(part)
        state.ledger.move(live.group, live.attempts(part), "buffered", "training")


def _trained(state: RunState, r: dict[str, Any]) -> None:
    state.step, state.version = r["step"], r["version"]
    state.means = dict(r.get("means", state.means))
    for part in r["groups"]:
        live = state.live_part(part)
        state.ledger.move(live.group, live.attempts(part), "training", "trained")
        state.num_trained_groups += not live.is_branch and not is_late(part)
        state.end(part)


_HANDLERS = {
    "admit": _admit,
    "tokens": _tokens,
    "turn": _turn,
    "episode": _episode,
    "scores": _scores,
    "again": _again,
    "scored": _scored,
    "pivots": _pivots,
    "explored": _explored,
    "drop": _drop,
    "take": _take,
    "trained": _trained,
}
