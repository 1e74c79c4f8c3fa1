"""The closing summary: both ledgers as tables that add up, how the reward moved, and the verdict.

In: a ``Progress`` that saw the run's events. Out: a ``Summary``, printable by rich, as plain text and as a
dict for ``--json``. Invariant: the attempts and tokens of all states, and the seconds and shares of all
activities of a role, sum to the total shown under them. All figures are of one call: of a resumed run, what came before
is left out, but for those that say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.observe.figures import duration, short
from headrace.observe.progress import Books, Progress
from headrace.observe.verdict import (
    Verdict,
    goodput,
    hidden_share,
    idle_share,
    judge,
    percentages,
    scoring_seconds,
)

STATE_ORDER = ("trained", "training", "buffered", "scoring", "generating")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What there is to say when a call that trains has ended."""

    run_dir: str
    num_steps: int
    """Taken by this call, those that were trained again from the journal included."""
    step: int
    """The step at which the run stands."""
    elapsed_s: float
    reward_first: float | None
    """Mean over the first ``reward_window`` steps seen; None: no step had a reward."""
    reward_last: float | None
    reward_window: int
    attempts: Mapping[str, int]
    """By state, of the attempts this call had to do with: those under way when it began, and those it admitted."""
    tokens: Mapping[str, int]
    """Of the same attempts."""
    run_attempts: Mapping[str, int]
    """By state, of the whole run: every attempt that was ever admitted, once."""
    run_tokens: Mapping[str, int]
    seconds: Mapping[str, Mapping[str, float]]
    """By role, then by activity."""
    idle: Mapping[str, float]
    """By role, the idle share since loading."""
    goodput: float
    verdict: Verdict
    missing_scores: Mapping[str, int] = field(default_factory=dict)
    """By source and reason."""
    asked_again: Mapping[str, int] = field(default_factory=dict)
    """Questions that failed while their attempt went on and were put again, likewise."""
    num_given_up: int = 0
    length_bias: float | None = None
    """Mean length of trained attempts over that of all that ended, in the whole run; None: none was trained."""
    branches: Mapping[str, int] = field(default_factory=dict)
    """What the engines counted of branches, by counter; empty: there were none."""

    def as_dict(self) -> dict[str, Any]:
        """JSON types only, with the totals written out."""
        return {
            **asdict(self),
            "attempts_total": sum(self.attempts.values()),
            "tokens_total": sum(self.tokens.values()),
            "shares": {role: percentages(seconds) for role, seconds in self.seconds.items()},
        }

    def as_text(self) -> str:
        """The summary for files and pipes."""
        closing = "\n".join(f"{name:<9}{text}" for name, text in self.closing())
        return "\n\n".join([self.headline(), *map(_as_text, self.tables()), closing])

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self.headline(), style="bold")]
        for table in self.tables():
            parts += [Text(), _as_rich(table)]
        closing = Table.grid(padding=(0, 2))
        for name, text in self.closing():
            closing.add_row(Text(name, style="bold"), Text(text))
        return Group(*parts, Text(), closing)

    def headline(self) -> str:
        text = f"{self._steps()} in {duration(self.elapsed_s)}"
        if self.reward_first is not None and self.reward_last is not None:
            window = (
                f"means of the first and last {self.reward_window} steps"
                if self.reward_window > 1
                else "first and last step"
            )
            text += f", reward {self.reward_first:.3f} -> {self.reward_last:.3f} ({window})"
        return text

    def _steps(self) -> str:
        """How many, and of a resumed run which."""
        text = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        if self.num_steps == self.step:
            return text
        if self.num_steps == 0:
            return f"{text} (at step {self.step})"
        first = self.step - self.num_steps + 1
        return f"{text} ({first} to {self.step})" if self.num_steps > 1 else f"{text} ({self.step})"

    def closing(self) -> list[tuple[str, str]]:
        """The lines under the tables, as (name, text)."""
        idle = ", ".join(f"{role} {share:.1%}" for role, share in self.idle.items())
        lines = [
            ("goodput", f"{short(self.goodput)} trained tokens per device-second"),
            ("idle", f"{idle} (of the time since loading)" if idle else "no role has reported"),
            *self._scoring(),
            *self._lengths(),
            *self._branches(),
            *self._overall(),
            ("verdict", self.verdict.text),
        ]
        return [*lines, ("run", self.run_dir)] if self.run_dir else lines

    def _scoring(self) -> list[tuple[str, str]]:
        """How far scoring stayed out of the way; nothing where no time went into it."""
        seconds = self.seconds.get("scoring", {})
        spent = scoring_seconds(seconds)
        if spent == 0:
            return []
        parts = [f"{hidden_share(seconds):.1%} of {spent:,.1f} s hidden behind generation"]
        if self.num_given_up:
            parts.append(f"{self.num_given_up} attempts given up early")
        parts += [f"{count} questions put again ({reason})" for reason, count in self.asked_again.items()]
        parts += [f"{count} scores missing ({reason})" for reason, count in self.missing_scores.items()]
        return [("scoring", "; ".join(parts))]

    def _lengths(self) -> list[tuple[str, str]]:
        """Whether training saw answers as long as they were given; nothing where it saw all of them."""
        if self.length_bias is None or f"{self.length_bias:.3f}" == "1.000":
            return []
        span = ", in the whole run" if self._had_begun else ""
        text = f"a trained attempt has {self.length_bias:.3f} times the tokens of all that ended{span}"
        return [("lengths", text)]

    def _branches(self) -> list[tuple[str, str]]:
        """Whether branches found what they left; nothing where there were none."""
        if not self.branches:
            return []
        n = self.branches
        parts = [f"{n['forks']} from live blocks, {n['forked_tokens']:,} tokens not prefilled"]
        parts += [f"{n['forks_stale']} prefilled, weights had changed"] if n["forks_stale"] else []
        parts += [f"{n['forks_freed']} prefilled, blocks were freed"] if n["forks_freed"] else []
        return [("branches", "; ".join(parts))]

    @property
    def _had_begun(self) -> bool:
        """Whether this call went on with a run that had attempts behind it."""
        return self.run_attempts != self.attempts

    def _overall(self) -> list[tuple[str, str]]:
        """The whole run, where this call was only its end."""
        if not self._had_begun:
            return []
        num_attempts, num_trained = sum(self.run_attempts.values()), self.run_attempts.get("trained", 0)
        return [
            (
                "overall",
                f"{self.step} steps; {num_attempts:,} attempts, of which {num_trained:,} were trained",
            )
        ]

    def tables(self) -> list[LedgerTable]:
        return [table for table in (_attempt_table(self), _time_table(self)) if len(table.rows) > 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTable:
    """Rows of text under a header; the first ``num_labels`` columns are names, the others numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_labels: int
    total_rows: frozenset[int]


def summarise(progress: Progress) -> Summary:
    """Sum up the run that ``progress`` has seen."""
    rewards = progress.rewards
    window = max(1, min(10, len(rewards) // 10))
    run, call = progress.books, progress.books.since(progress.before)
    return Summary(
        run_dir=progress.run_dir,
        num_steps=call.step,
        step=run.step,
        elapsed_s=progress.elapsed_s,
        reward_first=sum(rewards[:window]) / window if rewards else None,
        reward_last=sum(rewards[-window:]) / window if rewards else None,
        reward_window=window,
        attempts=_ordered(call.attempts),
        tokens=_ordered(call.tokens),
        run_attempts=_ordered(run.attempts),
        run_tokens=_ordered(run.tokens),
        seconds={role.role: dict(role.seconds) for role in progress.roles},
        idle={role.role: idle_share(role.seconds) for role in progress.roles},
        goodput=goodput(call.tokens, progress.roles),
        verdict=_verdict(progress, call),
        missing_scores=call.missing_scores,
        asked_again=call.asked_again,
        num_given_up=call.num_given_up,
        length_bias=progress.length_bias,
        branches=_branches(progress),
    )


def _verdict(progress: Progress, call: Books) -> Verdict:
    if not progress.num_steps_seen:
        return Verdict(bottleneck="unknown", text="no verdict: no new step was taken")
    return judge(progress.roles, call.tokens, progress.settings)


def _branches(progress: Progress) -> dict[str, int]:
    """Of all engines, since they were started."""
    names = ("forks", "forked_tokens", "forks_stale", "forks_freed")
    counts = {name: int(sum(role.counters.get(name, 0) for role in progress.roles)) for name in names}
    return counts if any(counts.values()) else {}


def _ordered(by_state: Mapping[str, int]) -> dict[str, int]:
    known = [state for state in STATE_ORDER if state in by_state]
    return {state: by_state[state] for state in [*known, *sorted(set(by_state) - set(known))]}


def _attempt_table(summary: Summary) -> LedgerTable:
    states = [s for s in summary.attempts if summary.attempts[s] or summary.tokens.get(s)]
    attempts = percentages({s: summary.attempts[s] for s in states})
    tokens = percentages({s: summary.tokens.get(s, 0) for s in states})
    rows = [
        (
            s.replace(":", ": "),
            f"{summary.attempts[s]:,}",
            f"{attempts[s]:.1f}%",
            f"{summary.tokens.get(s, 0):,}",
            f"{tokens[s]:.1f}%",
        )
        for s in states
    ]
    rows.append(
        (
            "total",
            f"{sum(summary.attempts.values()):,}",
            f"{sum(attempts.values()):.1f}%",
            f"{sum(summary.tokens.values()):,}",
            f"{sum(tokens.values()):.1f}%",
        )
    )
    return LedgerTable(
        header=("state", "attempts", "share", "tokens", "share"),
        rows=tuple(rows),
        num_labels=1,
        total_rows=frozenset({len(rows) - 1}),
    )


def _time_table(summary: Summary) -> LedgerTable:
    rows: list[tuple[str, ...]] = []
    totals: set[int] = set()
    for role, seconds in summary.seconds.items():
        parts = percentages(seconds)
        spent = sorted((a for a in seconds if seconds[a] > 0), key=lambda a: -seconds[a])
        for i, activity in enumerate(spent):
            rows.append(
                (role if i == 0 else "", activity, f"{seconds[activity]:,.1f}", f"{parts[activity]:.1f}%")
            )
        totals.add(len(rows))
        rows.append(("", "total", f"{sum(seconds.values()):,.1f}", f"{sum(parts.values()):.1f}%"))
    return LedgerTable(
        header=("role", "activity", "seconds", "share"),
        rows=tuple(rows),
        num_labels=2,
        total_rows=frozenset(totals),
    )


def _as_text(table: LedgerTable) -> str:
    columns = list(zip(table.header, *table.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i < table.num_labels else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([line(table.header), rule, *map(line, table.rows)])


def _as_rich(table: LedgerTable) -> Table:
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(table.header):
        drawn.add_column(name, justify="left" if i < table.num_labels else "right", no_wrap=True)
    for i, row in enumerate(table.rows):
        drawn.add_row(*row, style="dim" if i in table.total_rows else None)
    return drawn
