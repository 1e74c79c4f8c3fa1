"""Everything a run's directory still holds of its rollouts, for people and checkers.

In: a run directory, running, ended or damaged. Out: a ``Recording``: by group, the task, every turn of every attempt,
rewards, and how the group ended. It is read from the checkpoints' controller states and the journal behind them, and
changes nothing. Where recovery stops at damage, this notes file and offset and goes on, so a group may be known in
part only: of one whose admission is lost, the task is unknown.

Segments that no kept checkpoint needs are gone (``run.keep_checkpoints``), and with them the groups that ended in them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace import wire
from headrace.data import completions
from headrace.data.samples import sequences
from headrace.errors import ConfigError
from headrace.runtime.checkpoint import STATE_FILE
from headrace.runtime.journal import salvage, segment_path, segment_steps
from headrace.runtime.parts import group_of, is_late, late_part
from headrace.runtime.state import REFERENCE, TEACHER
from headrace.types import Completion, Episode, EpisodeGroup, ScoreColumn, Task, Trajectory, Turn

_OF_NO_GROUP = ("again", "pivots", "explored")
"""Kinds that count a question put again, or say where to branch off next; the branches themselves are groups with
records of their own."""
_UNDECODABLE = (ValueError, KeyError, TypeError, IndexError, struct.error, json.JSONDecodeError)


class Damage(NamedTuple):
    """Bytes that are no record."""

    file: Path
    offset: int
    text: str


class RecordedTrajectory(NamedTuple):
    turns: tuple[int, ...]
    """By number."""
    text: str
    policy: str
    trainable: bool
    own_reward: float = 0.0
    peers: str = ""


@dataclass(slots=True)
class RecordedAttempt:
    turns: dict[int, Turn] = field(default_factory=dict)
    """Finished turns by number."""
    unfinished: Completion | None = None
    trajectories: tuple[RecordedTrajectory, ...] | None = None
    """None: the attempt has not ended."""
    rewards: dict[str, float | None] | None = None
    total: float | None = None
    """The weighted sum of its rewards; None: not scored."""

    def missing_turns(self) -> list[int]:
        """Turns that are spoken of and not here."""
        named = [number for told in self.trajectories or () for number in told.turns]
        known = max([*self.turns, *named], default=-1) + 1
        return [number for number in range(known) if number not in self.turns]

    @property
    def num_tokens(self) -> int:
        partial = 0 if self.unfinished is None else self.unfinished.num_tokens
        return partial + sum(turn.completion.num_tokens for turn in self.turns.values())


@dataclass(slots=True)
class RecordedGroup:
    group: int
    task: Task | None
    version: int | None
    """The weights the engines had when it was admitted; None, as ``task``: its admission is lost."""
    attempts: dict[int, RecordedAttempt] = field(default_factory=dict)
    ended: str = "generating"
    ref_logprobs: tuple[np.ndarray, ...] | None = None
    waiting: set[int] = field(default_factory=set)
    """Late attempts that were not scored, though a quorum of the others was."""
    reference: dict[int, tuple[np.ndarray, ...]] = field(default_factory=dict)
    """By attempt, what the reference said of its samples before the group was scored."""
    columns: dict[int, dict[str, list[ScoreColumn]]] = field(default_factory=dict)
    """What was said of its attempts, by attempt and source, in the order in which it was told."""
    missing: set[tuple[str, int]] | None = None
    """(source, attempt) of what its attempts were scored without; None: not known, since a checkpoint does not say."""

    def tell(self, part: int, text: str) -> None:
        """How the group, or its late attempts, went on."""
        self.ended = f"{self.ended}; late attempts {text}" if is_late(part) else text

    def attempt(self, number: int) -> RecordedAttempt:
        return self.attempts.setdefault(number, RecordedAttempt())

    def episodes(self) -> list[Episode]:
        """The attempts that ended, as the run had them; those of which a part is lost are left out."""
        found = []
        for number, attempt in sorted(self.attempts.items()):
            if attempt.trajectories is None or self.task is None or attempt.missing_turns():
                continue
            trajectories = tuple(
                Trajectory(
                    turns=tuple([attempt.turns[i] for i in told.turns]),
                    text=told.text,
                    rewards=(attempt.rewards or {}) if place == 0 else {},
                    policy=told.policy,
                    trainable=told.trainable,
                    own_reward=told.own_reward,
                    peers=told.peers,
                )
                for place, told in enumerate(attempt.trajectories)
            )
            found.append(Episode(group=self.group, attempt=number, task=self.task, trajectories=trajectories))
        return found


@dataclass(slots=True)
class Recording:
    groups: dict[int, RecordedGroup] = field(default_factory=dict)
    damages: list[Damage] = field(default_factory=list)
    newest_version: int = 0
    num_records: int = 0
    num_files: int = 0

    def group(self, number: int) -> RecordedGroup:
        return self.groups.setdefault(number, RecordedGroup(number, None, None))

    def add(self, record: dict[str, Any]) -> None:
        """One record of the journal (``state`` has the kinds); one that goes on with what is lost adds what it can."""
        kind = record["kind"]
        if kind in _OF_NO_GROUP:
            return
        if kind in ("take", "trained"):
            if kind == "trained":
                self.newest_version = max(self.newest_version, record["version"])
            for part in record["groups"]:
                verb = "training in" if kind == "take" else "trained in"
                self.group(group_of(part)).tell(part, f"{verb} step {record['step']}")
            return
        if kind == "scores":
            for column in record["columns"]:
                _add_column(self.group(column.group), column)
            return
        group = self.group(group_of(record["group"]))
        if kind == "admit":
            group.task, group.version = record["task"], record["version"]
            for number in range(record["attempts"]):
                group.attempt(number)
        elif kind == "drop":
            detail = f" ({record['detail']})" if record["detail"] else ""
            group.tell(record["group"], f"dropped: {record['reason']}{detail}")
        elif kind == "scored":
            _add_scores(group, record)
        else:
            _add_to_attempt(group.attempt(record["attempt"]), record)

    def add_state(self, state: dict[str, Any]) -> None:
        """What a checkpoint knows of the groups that lived when it was taken."""
        self.newest_version = max(self.newest_version, state["version"])
        for live in state["groups"]:
            group = RecordedGroup(live["group"], live["task"], live["version"])
            # A quorum that has ended is nothing the checkpoint knows of any more.
            ended = live["quorum"] if live["scored"] is None else []
            if ended and group.group in self.groups:
                before = self.groups[group.group]
                group.attempts, group.ended = {a: before.attempt(a) for a in ended}, before.ended
                group.columns = {a: before.columns[a] for a in ended if a in before.columns}
                group.missing = before.missing
            _add_live(group, live, [a for a in range(live["num_attempts"]) if a not in ended])
            self.groups[group.group] = group


def _add_live(group: RecordedGroup, live: dict[str, Any], numbers: list[int]) -> None:
    """What a checkpoint holds of these attempts."""
    for number in numbers:
        attempt = group.attempt(number)
        attempt.turns = dict(enumerate(live["turns"].get(number, [])))
        attempt.unfinished = live["unfinished"].get(number)
    parts = [part for part in (live["scored"], live["late"]) if part is not None]
    for episode in live["episodes"].values():
        _add_episode(group.attempt(episode.attempt), episode, live["turn_order"].get(episode.attempt))
    for episode in [e for part in parts for e in part.episodes]:
        _add_episode(group.attempt(episode.attempt), episode)
    for column in [c for by_attempt in live["columns"].values() for c in by_attempt.values()]:
        _add_column(group, column)
    for column in [column for part in parts for column in _part_columns(part)]:
        _add_column(group, column)
    for part in parts:
        if group.ended == "generating":
            group.ended = "buffered"
        # Of a part, the rows do not say which attempt they belong to.
        group.ref_logprobs = part.ref_logprobs if len(part.episodes) == live["num_attempts"] else None
        for episode, total in zip(part.episodes, part.returns, strict=True):
            group.attempts[episode.attempt].total = total
    if live["quorum"]:
        group.waiting = {number for number in numbers if group.attempts[number].total is None}


def _part_columns(part: EpisodeGroup) -> Iterator[ScoreColumn]:
    """What a checkpoint keeps of the scores of a part, as the sources gave it; rewards are with the episodes."""
    yield from part.scores
    rows = iter(part.teacher or ())
    for episode in part.episodes if part.teacher is not None else ():
        of_attempt = tuple(islice(rows, len(sequences([episode]))))
        yield ScoreColumn(source=TEACHER, group=part.group, attempt=episode.attempt, teacher=of_attempt)


def _add_to_attempt(attempt: RecordedAttempt, record: dict[str, Any]) -> None:
    kind = record["kind"]
    if kind == "tokens":
        attempt.unfinished = completions.join(attempt.unfinished or completions.EMPTY, record["more"])
    elif kind == "turn":
        known, turn = attempt.unfinished, record["value"]
        if known is not None:
            turn = replace(turn, completion=completions.join(known, turn.completion))
        attempt.turns[record["turn"]], attempt.unfinished = turn, None
    elif kind == "episode":
        attempt.trajectories = tuple(
            RecordedTrajectory(tuple(turns), *told) for turns, *told in record["trajectories"]
        )
    else:
        raise ValueError(f"a record of the unknown kind {kind!r}")


def _add_column(group: RecordedGroup, column: ScoreColumn) -> None:
    group.columns.setdefault(column.attempt, {}).setdefault(column.source, []).append(column)
    if group.task is not None and column.attempt not in group.attempts:
        return
    attempt = group.attempt(column.attempt)
    if column.rewards:
        attempt.rewards = {**(attempt.rewards or {}), **column.rewards}
    if column.source == REFERENCE and column.logprobs is not None:
        group.reference[column.attempt] = column.logprobs


def _add_scores(group: RecordedGroup, record: dict[str, Any]) -> None:
    numbers = record.get("attempts", range(len(record["returns"])))
    for number, total in zip(numbers, record["returns"], strict=True):
        group.attempt(number).total = total
    told = {(source, attempt) for source, attempt, _ in record["missing"]}
    if not group.waiting:
        group.missing = told
    elif group.missing is not None:
        group.missing |= told
    group.tell(late_part(group.group) if group.waiting else group.group, "buffered")
    group.waiting = {number for number, attempt in group.attempts.items() if attempt.total is None}
    known = [a for a in sorted(group.reference) if a not in group.waiting]
    # A quorum that a checkpoint has let go took its rows along.
    if known and ("attempts" not in record or set(known) == group.attempts.keys() - group.waiting):
        group.ref_logprobs = tuple([row for a in known for row in group.reference[a]])


def _add_episode(attempt: RecordedAttempt, episode: Episode, order: list[int] | None = None) -> None:
    """Of a checkpoint. Of an attempt that is not scored it has the turns too, by number; of one that is, only those
    in its trajectories, which are then numbered one after the other."""
    numbers = iter(order if order is not None else count())
    told = []
    for trajectory in episode.trajectories:
        named = tuple(islice(numbers, len(trajectory.turns)))
        own = trajectory.own_reward, trajectory.peers
        told.append(RecordedTrajectory(named, trajectory.text, trajectory.policy, trajectory.trainable, *own))
    if order is None:
        attempt.turns = dict(enumerate(turn for t in episode.trajectories for turn in t.turns))
    attempt.trajectories = tuple(told)
    attempt.rewards = dict(episode.trajectories[0].rewards) or None


def read_recording(run_dir: Path) -> Recording:
    directory = run_dir / "journal"
    steps = segment_steps(directory)
    if not steps:
        raise ConfigError(f"{run_dir} holds no journal; give the directory of a run")
    recording = Recording()
    for step in steps:
        path = segment_path(directory, step)
        recording.num_files += 1
        start = _read_state(recording, run_dir / "checkpoints" / path.stem / STATE_FILE)
        for offset, body in salvage(path, start=start):
            if body is None:
                recording.damages.append(Damage(path, offset, "cut off or overwritten"))
                continue
            try:
                for record in wire.decode(body):
                    recording.add(record)
                    recording.num_records += 1
            except _UNDECODABLE as e:
                recording.damages.append(Damage(path, offset, f"not readable ({type(e).__name__}: {e})"))
    return recording


def _read_state(recording: Recording, path: Path) -> int:
    """Adds what a checkpoint holds, if there is one; returns how much of its journal segment is older than it."""
    if not path.exists():
        return 0
    try:
        saved = wire.decode(path.read_bytes())
        recording.add_state(saved["state"])
        return int(saved["journal_bytes"])
    except _UNDECODABLE as e:
        recording.damages.append(Damage(path, 0, f"not readable ({type(e).__name__}: {e})"))
        return 0
