"""Recorded rollouts as people read them: all groups in a table, one group turn by turn, a report of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from rich.table import Table

from headrace.data.steps import judge_versions
from headrace.replay.check import Report
from headrace.runtime.recording import RecordedAttempt, RecordedGroup, Recording
from headrace.types import Completion, ScoreColumn, Turn

Decode = Callable[[np.ndarray], str]
SHOWN_FAULTS = 20
_SHOWN_TEXT = 200


def groups_table(recording: Recording) -> Table:
    drawn = _table("group", "task", "attempts", "turns", "tokens", "versions", "return", "end")
    for group in recording.groups.values():
        attempts = list(group.attempts.values())
        totals = [attempt.total for attempt in attempts if attempt.total is not None]
        turns = [turn for attempt in attempts for turn in attempt.turns.values()]
        drawn.add_row(
            str(group.group),
            "lost" if group.task is None else group.task.id,
            str(len(attempts)),
            str(len(turns)),
            f"{sum(attempt.num_tokens for attempt in attempts):,}",
            _span([version for turn in turns for version in turn.completion.versions]),
            f"{sum(totals) / len(totals):.4f}" if totals else "",
            group.ended,
        )
    return drawn


def group_lines(group: RecordedGroup, decode: Decode | None) -> Iterator[str]:
    """``decode`` None: there is no tokenizer, so token ids are shown."""
    task = "its task is lost" if group.task is None else f"task {group.task.id}"
    yield f"group {group.group}: {task}, admitted at version {group.version}; {group.ended}"
    for name, value in ({} if group.task is None else group.task.columns).items():
        yield f"  {name:<19} {_cut(str(value))}"
    for number, attempt in sorted(group.attempts.items()):
        yield ""
        yield from _attempt_lines(number, attempt, decode)
        yield from _score_lines(group.columns.get(number, {}))


def _attempt_lines(number: int, attempt: RecordedAttempt, decode: Decode | None) -> Iterator[str]:
    rewards = ", ".join(f"{name} {value}" for name, value in (attempt.rewards or {}).items())
    total = "not scored" if attempt.total is None else f"return {attempt.total:.4f}"
    yield f"attempt {number}: {total}{f' ({rewards})' if rewards else ''}"
    for index, turn in sorted(attempt.turns.items()):
        for name, text in _turn_rows(turn, decode):
            yield f"  turn {index:<3} {name:<11} {text}"
    if attempt.unfinished is not None:
        for name, text in _completion_rows(attempt.unfinished, decode):
            yield f"  unfinished {name:<9} {text}"


def _score_lines(said: dict[str, list[ScoreColumn]]) -> Iterator[str]:
    """Of sources that judge steps or change: what they gave, and which versions of them."""
    for source, columns in sorted(said.items()):
        versions = np.concatenate([judge_versions(column) for column in columns])
        steps = [column.step_scores for column in columns if column.step_scores is not None]
        if not steps and not versions.any():
            continue
        scores = ", ".join(f"{score:.3f}" for part in steps for score in part)
        by = f", given by {_runs(versions)}" if versions.any() else ""
        yield f"  scores     {source:<9} {_cut(scores)}{by}"


def _turn_rows(turn: Turn, decode: Decode | None) -> Iterator[tuple[str, str]]:
    s = turn.sampling
    cuts = [f"top_k {s.top_k}"] * (s.top_k > 0) + [f"top_p {s.top_p:g}"] * (s.top_p < 1)
    cuts += [f"min_p {s.min_p:g}"] * (s.min_p > 0)
    yield "prompt", f"{len(turn.prompt_ids)} tokens: {_text(turn.prompt_ids, decode)}"
    yield from _completion_rows(turn.completion, decode)
    yield "sampling", ", ".join([f"temperature {s.temperature:g}", *cuts, f"max_tokens {s.max_tokens}"])
    yield "drawn by", f"{turn.engine}, seed {turn.seed}"


def _completion_rows(done: Completion, decode: Decode | None) -> Iterator[tuple[str, str]]:
    yield "completion", f"{done.num_tokens} tokens, {done.finish_reason}: {_text(done.token_ids, decode)}"
    if not done.num_tokens:
        return
    yield "logprobs", f"mean {done.logprobs.mean():.4f}, lowest {done.logprobs.min():.4f}"
    yield "versions", f"{_runs(done.versions)}; keys and values by {_kv_runs(done.kv_versions)}"
    if done.sampling_mask is not None:
        counts = np.diff(done.sampling_mask.offsets)
        yield "mask", f"{counts.mean():.1f} ids kept a token, {counts.max()} at most"
    if done.routing is not None:
        _, layers, experts = done.routing.experts.shape
        recorded = done.routing.recorded
        yield (
            "routes",
            f"{int(recorded.sum())} of {len(recorded)} tokens, {layers} layers, {experts} experts each",
        )


def report_table(report: Report) -> Table:
    drawn = _table("check", "records", "faults")
    faults = report.num_faults
    for check, count in report.num_checked.items():
        drawn.add_row(check, f"{count:,}", str(faults[check]), style="bold red" if faults[check] else None)
    return drawn


def report_lines(report: Report) -> Iterator[str]:
    for found in report.faults[:SHOWN_FAULTS]:
        yield f"{found.check}: {found.where}: {found.text}"
    if len(report.faults) > SHOWN_FAULTS:
        yield f"and {len(report.faults) - SHOWN_FAULTS} more (--json writes all of them)"


def _table(*columns: str) -> Table:
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        is_text = column in ("task", "end", "check")
        drawn.add_column(column, justify="left" if is_text else "right", no_wrap=column != "end")
    return drawn


def _span(versions: list[int]) -> str:
    if not versions:
        return ""
    first, last = min(versions), max(versions)
    return str(first) if first == last else f"{first} to {last}"


def _runs(versions: np.ndarray) -> str:
    """Versions in order, with how many tokens each drew."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    counts = np.diff(starts, append=len(versions))
    return _joined(zip(versions[starts].tolist(), counts.tolist(), strict=True))


def _kv_runs(runs: np.ndarray) -> str:
    return _joined(runs.tolist()) or "nobody"


def _joined(runs: Iterator[tuple[int, int]] | list[list[int]]) -> str:
    return ", ".join(f"{version} x {count}" for version, count in runs)


def _text(token_ids: np.ndarray, decode: Decode | None) -> str:
    shown = " ".join(map(str, token_ids.tolist())) if decode is None else repr(decode(token_ids))
    return _cut(shown)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}..."
