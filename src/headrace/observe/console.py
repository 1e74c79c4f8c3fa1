"""The run on the screen: one redrawn view on a terminal, aligned lines anywhere else.

In: events. Out: characters. Modes: ``live`` redraws in place, ``plain`` prints a line a step, ``auto`` is
live on a terminal and plain elsewhere, ``off`` prints nothing. Warnings are printed once and stay.
The closing summary is printed at ``run.end`` in every mode but ``off``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.observe import events
from headrace.observe.figures import ASCII_BLOCKS, BLOCKS, duration, short, sparkline
from headrace.observe.progress import Progress, message
from headrace.observe.summary import summarise
from headrace.observe.verdict import idle_share, kind

ConsoleMode = Literal["auto", "live", "plain", "off"]

LIVE_STATES = ("generating", "scoring", "buffered", "training")
HEADER_EVERY = 20
PHASE_EVERY_S = 5.0
PLAIN_COLUMNS = (
    ("time", 8),
    ("step", 11),
    ("reward", 8),
    ("lag", 8),
    ("tokens/s", 9),
    ("goodput", 8),
    ("flight", 7),
    ("buffer", 7),
)


class ConsoleSink:
    """Shows a run as it goes."""

    def __init__(
        self,
        mode: ConsoleMode = "auto",
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._console = console or Console()
        self._mode = _settled(mode, self._console)
        self._clock = clock
        self.progress = Progress(clock=clock)
        self._live: Live | None = None
        self._num_lines = 0
        self._last_phase = ("", float("-inf"))

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        news = event in (events.WARNING, events.EVAL) or (event == events.DROP and self._drop_is_news(fields))
        self.progress.emit(event, fields)
        if self._mode == "off":
            return
        if self._mode == "live" and self._live is None and event != events.RUN_END:
            self._live = Live(get_renderable=self._view, console=self._console, refresh_per_second=4)
            self._live.start()
        if event == events.RUN_END:
            self._end_live()
            self._print_summary()
        elif news:
            self._say(message(event, fields))
        elif self._mode == "plain":
            self._plain(event, fields)
        if event == events.STEP and fields.get("skipped"):
            self._say(f"warning: {self.progress.message}")

    def close(self) -> None:
        self._end_live()

    def _drop_is_news(self, fields: Mapping[str, Any]) -> bool:
        """The first of each reason is said; the rest are counted. Every run ends by cancelling its tail."""
        reason = str(fields.get("reason"))
        return reason != "cancelled" and reason not in self.progress.drops

    def _print_summary(self) -> None:
        summary = summarise(self.progress)
        if self._mode == "live":
            self._console.print(summary)
        else:
            self._say("\n" + summary.as_text())

    def _plain(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == events.PHASE and self._phase_is_news(str(fields.get("text", ""))):
            self._say(message(event, fields))
        elif event == events.STEP:
            if self._num_lines % HEADER_EVERY == 0:
                self._say(plain_header())
            self._say(plain_line(self.progress))
            self._num_lines += 1

    def _phase_is_news(self, text: str) -> bool:
        """A counter inside a phase ticks often; off a terminal each tick would be a line."""
        subject = re.sub(r"\d+", "#", text)
        last_subject, last_time = self._last_phase
        news = subject != last_subject or self._clock() - last_time >= PHASE_EVERY_S
        if news:
            self._last_phase = (subject, self._clock())
        return news

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _view(self) -> RenderableType:
        return live_view(self.progress, blocks=BLOCKS if _draws_blocks(self._console) else ASCII_BLOCKS)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def live_view(progress: Progress, *, blocks: str = BLOCKS) -> RenderableType:
    """The whole state in a few lines."""
    view = Table.grid(padding=(0, 2))
    view.add_column(style="bold", no_wrap=True)
    view.add_column()
    total = f"/{progress.num_steps}" if progress.num_steps else ""
    head = Table.grid(padding=(0, 2))
    head.add_row(
        f"{progress.step}{total}",
        ProgressBar(total=progress.num_steps or None, completed=progress.step, width=30),
        duration(progress.elapsed_s),
    )
    view.add_row("step", head)
    if progress.num_steps_seen:
        reward = f"{progress.rewards[-1]:.3f}  " if progress.rewards else "none  "
        view.add_row("reward", Text(reward + sparkline(progress.rewards, blocks=blocks)))
        view.add_row("lag", f"{progress.lag_mean:.2f} mean, {progress.lag_max} max")
        view.add_row(
            "speed",
            f"{short(progress.tokens_per_s)} tokens/s, goodput {short(progress.goodput)} per device-second",
        )
        view.add_row("idle", _idle_text(progress))
        view.add_row("attempts", "  ".join(f"{s} {progress.attempts.get(s, 0)}" for s in LIVE_STATES))
    if progress.drops:
        view.add_row("dropped", "  ".join(f"{r} {n}" for r, n in sorted(progress.drops.items())))
    view.add_row("", Text(progress.message, style="dim"))
    return view


def plain_header() -> str:
    return "  ".join(name.rjust(width) for name, width in PLAIN_COLUMNS) + "  idle"


def plain_line(progress: Progress) -> str:
    """One step, under ``plain_header``."""
    attempts = progress.attempts
    cells = (
        duration(progress.elapsed_s),
        f"{progress.step}/{progress.num_steps}" if progress.num_steps else f"{progress.step}",
        f"{progress.rewards[-1]:.3f}" if progress.rewards else "-",
        f"{progress.lag_mean:.2f}/{progress.lag_max}",
        short(progress.tokens_per_s),
        short(progress.goodput),
        str(attempts.get("generating", 0) + attempts.get("scoring", 0)),
        str(attempts.get("buffered", 0)),
    )
    row = "  ".join(cell.rjust(width) for cell, (_, width) in zip(cells, PLAIN_COLUMNS, strict=True))
    return f"{row}  {_idle_text(progress)}".rstrip()


def _idle_text(progress: Progress) -> str:
    """Idle shares of the workers; the controller is left out, since waiting is its healthy state."""
    workers = (role for role in progress.roles if kind(role.role) != "controller")
    return "  ".join(f"{role.role} {idle_share(role.seconds):4.0%}" for role in workers)


def _settled(mode: ConsoleMode, console: Console) -> str:
    if mode != "auto":
        return mode
    return "live" if console.is_terminal and not console.is_dumb_terminal else "plain"


def _draws_blocks(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
