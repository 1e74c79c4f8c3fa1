"""Every record of a run held against the contract: what is wrong is named, counted, and stops nothing else.

In: a ``Recording`` and what is known of the run. Out: a ``Report`` with one line for each kind of check, how many
records it looked at and how many failed, and each fault with the group, attempt and turn it was found in.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from headrace.config import Settings
from headrace.data.record_checks import ABOVE_ZERO, Check, Fault, Limits, turn_faults
from headrace.data.routing import router_shape
from headrace.data.samples import sequences
from headrace.data.score_checks import step_faults, teacher_faults
from headrace.data.steps import PROCESS
from headrace.run_directory import latest_checkpoint
from headrace.runtime.recording import RecordedAttempt, RecordedGroup, Recording
from headrace.runtime.rollout import turn_seed
from headrace.runtime.state import TEACHER
from headrace.runtime.teachers import COLUMN as TEACHER_OF_TASK


class Found(NamedTuple):
    where: str
    check: str
    text: str


@dataclass(slots=True)
class Report:
    num_checked: Counter[str] = field(default_factory=Counter)
    """Records looked at, by check."""
    faults: list[Found] = field(default_factory=list)

    @property
    def num_faults(self) -> Counter[str]:
        return Counter(found.check for found in self.faults)

    def looked(self, where: str, check: str, faults: Iterable[str]) -> None:
        self.num_checked[check] += 1
        self.faults += [Found(where, check, text) for text in faults]

    def as_dict(self) -> dict[str, Any]:
        return {
            "checks": {
                check: {"checked": count, "faults": self.num_faults[check]}
                for check, count in self.num_checked.items()
            },
            "faults": [found._asdict() for found in self.faults],
        }


def run_limits(run_dir: Path, settings: Settings, recording: Recording) -> Limits:
    """From the configuration of a checkpoint, or of the model the run started from where that lies here."""
    checkpoint = latest_checkpoint(run_dir)
    places = [checkpoint, Path(settings.model.path or "")]
    files = [place / "config.json" for place in places if place is not None]
    found = next((file for file in files if file.is_file()), None)
    config: dict[str, Any] = {} if found is None else json.loads(found.read_text())
    routers = None if found is None else router_shape(found)
    config |= config.get("text_config", {})

    def first(*names: str) -> int | None:
        return next((int(config[name]) for name in names if config.get(name) is not None), None)

    return Limits(
        vocab_size=first("vocab_size"),
        newest_version=recording.newest_version,
        # An engine with less memory than a context ends sequences where the memory does.
        context_tokens=first("max_position_embeddings") if settings.engine.kv_tokens is None else None,
        num_experts=first("num_experts", "num_local_experts", "n_routed_experts"),
        experts_per_token=first("num_experts_per_tok"),
        routed_layers=None if routers is None else routers.num_layers,
        may_give_up=settings.scoring.abort_below is not None,
    )


def check_recording(recording: Recording, limits: Limits, *, seed: int) -> Report:
    """``seed`` is the run's."""
    report = Report()
    report.num_checked["disk"] = recording.num_records + len(recording.damages)
    report.faults += [
        Found(f"{damage.file}, byte {damage.offset}", "disk", damage.text) for damage in recording.damages
    ]
    for group in recording.groups.values():
        for number, attempt in sorted(group.attempts.items()):
            where = f"attempt {group.group}/{number}"
            _check_turns(report, where, attempt, limits, seed=(seed, group.group, number))
            report.looked(where, "episode", _episode_faults(attempt))
            _check_scores(report, where, group, number, limits)
        report.looked(f"group {group.group}", "group", _group_faults(group))
    return report


def _check_turns(
    report: Report, where: str, attempt: RecordedAttempt, limits: Limits, *, seed: tuple[int, int, int]
) -> None:
    # A checkpoint of several trajectories does not say which turn was the how manieth.
    numbered = attempt.trajectories is None or len(attempt.trajectories) == 1
    for number, turn in sorted(attempt.turns.items()):
        expected = turn_seed(*seed, number) if numbered else None
        faults = turn_faults(turn, limits, seed=expected)
        for check in get_args(Check):
            applies = {
                "routes": turn.completion.routing is not None,
                "mask": turn.completion.sampling_mask is not None or turn.sampling.truncates,
                "seed": numbered,
            }
            if applies.get(check, True):
                report.looked(f"{where}, turn {number}", check, _of(check, faults))


def _check_scores(report: Report, where: str, group: RecordedGroup, number: int, limits: Limits) -> None:
    attempt, said = group.attempts[number], group.columns.get(number, {})
    for source, columns in sorted(said.items()):
        if any(column.step_ends is not None or column.step_scores is not None for column in columns):
            known = group.missing is not None and number not in group.waiting and attempt.total is not None
            is_settled = known and (source, number) not in (group.missing or ())
            found = step_faults(columns, _turn_tokens(attempt, source), is_settled=is_settled)
            report.looked(f"{where}, {source}", "steps", found)
    taught = [column.teacher for column in said.get(TEACHER, ()) if column.teacher is not None]
    if taught:
        of_attempt = [episode for episode in group.episodes() if episode.attempt == number]
        ids = [ids for ids, _ in sequences(of_attempt)] if of_attempt else None
        report.looked(where, "teacher", teacher_faults(taught[0], ids, limits))


def _turn_tokens(attempt: RecordedAttempt, source: str) -> list[int] | None:
    """What the turns sampled that a source counts its steps by; None: one is lost."""
    if attempt.missing_turns():
        return None
    numbers = sorted(attempt.turns)
    if source != PROCESS and attempt.trajectories is not None:
        numbers = [number for told in attempt.trajectories for number in told.turns]
    partial = [] if attempt.unfinished is None else [attempt.unfinished.num_tokens]
    return [attempt.turns[number].completion.num_tokens for number in numbers] + partial


def _of(check: str, faults: list[Fault]) -> Iterator[str]:
    return (fault.text for fault in faults if fault.check == check)


def _episode_faults(attempt: RecordedAttempt) -> Iterator[str]:
    missing = attempt.missing_turns()
    if missing:
        yield f"turn {missing[0]} is spoken of, but its record is lost"
    if attempt.trajectories is not None and attempt.unfinished is not None:
        yield f"it has ended, but {attempt.unfinished.num_tokens} tokens belong to no finished turn"


def _group_faults(group: RecordedGroup) -> Iterator[str]:
    if group.task is None:
        yield "the record of its admission is lost"
    yield from _binding_faults(group)
    scored = [number for number, attempt in group.attempts.items() if attempt.total is not None]
    if not scored:
        if group.ended.startswith("train"):
            yield f"it was {group.ended}, but the record of its scores is lost"
        return
    for number, attempt in sorted(group.attempts.items()):
        if number in group.waiting:
            continue
        if attempt.total is None or not math.isfinite(attempt.total):
            yield f"attempt {number} has the return {attempt.total}"
        if attempt.trajectories is None:
            yield f"it was scored, but the end of attempt {number} is lost"
    yield from _reference_faults(group)


def _binding_faults(group: RecordedGroup) -> Iterator[str]:
    """Scores that name an attempt there is not, were given twice, or by another teacher than the task's."""
    for number, said in sorted(group.columns.items()):
        if number not in group.attempts:
            yield f"{', '.join(sorted(said))} scored attempt {number}, but the group has {len(group.attempts)} attempts"
        for source, columns in sorted(said.items()):
            if len(columns) > 1 and any(column.step_ends is None for column in columns):
                yield f"{source} scored attempt {number} {len(columns)} times"
    columns = [column for said in group.columns.values() for column in said.get(TEACHER, ())]
    names = {scores.teacher for column in columns for scores in column.teacher or ()}
    if len(names) > 1 or (names and any(column.teacher is None for column in columns)):
        yield f"some of its attempts are scored by {' and '.join(sorted(names))}, and some are not"
    wanted = None if group.task is None else group.task.columns.get(TEACHER_OF_TASK)
    if names and wanted is not None and names != {wanted}:
        yield f"its task names the teacher {wanted}, but the scores are of {' and '.join(sorted(names))}"


def _reference_faults(group: RecordedGroup) -> Iterator[str]:
    episodes = group.episodes()
    if group.ref_logprobs is None or len(episodes) < len(group.attempts):
        return
    lengths = [len(ids) for ids, _ in sequences(episodes)]
    found = [len(logprobs) for logprobs in group.ref_logprobs]
    if lengths != found:
        yield f"the reference scored sequences of {found} tokens, the samples have {lengths}"
    elif not all(np.isfinite(row).all() and (row <= ABOVE_ZERO).all() for row in group.ref_logprobs):
        yield "the reference has a logprob that is above 0 or not finite"
