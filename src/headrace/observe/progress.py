"""Where a run stands, gathered from its events; what the console draws and the summary sums up.

In: events. Out: a ``Progress`` that holds the newest figures and the reward of every step. It is a sink itself, so a
run can be summed up without a console.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.observe import events
from headrace.types import RoleStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What the whole run has counted up to a moment, the calls before a resume included."""

    step: int = 0
    attempts: Mapping[str, int] = field(default_factory=dict)
    """By state, and so are tokens."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    missing_scores: Mapping[str, int] = field(default_factory=dict)
    """Scores that attempts were trained without, by source and reason."""
    asked_again: Mapping[str, int] = field(default_factory=dict)
    """Questions that failed while their attempt went on and were put again, by source and reason."""
    num_given_up: int = 0
    """Attempts ended early because their steps looked hopeless."""

    def since(self, before: Books) -> Books:
        """What this call had to do with: attempts that ended since ``before``, and all that are under way."""
        return Books(
            step=self.step - before.step,
            attempts=_ended_since(self.attempts, before.attempts),
            tokens=_ended_since(self.tokens, before.tokens),
            missing_scores=_grown(self.missing_scores, before.missing_scores),
            asked_again=_grown(self.asked_again, before.asked_again),
            num_given_up=self.num_given_up - before.num_given_up,
        )


class Progress:
    """The newest state of one run. Everything before the first event is empty or zero."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._ended: float | None = None
        self.num_steps = 0
        """Steps at which the run is complete; 0: not known yet."""
        self.run_dir = ""
        self.settings: dict[str, Any] = {}
        """Of the run's settings, those that the verdict depends on, by name."""
        self.step = 0
        self.version = 0
        self.rewards: list[float] = []
        """One per step seen; a step without any reward adds none."""
        self.lag_mean = 0.0
        self.lag_max = 0
        self.tokens_per_s = 0.0
        self.goodput = 0.0
        self.roles: tuple[RoleStatus, ...] = ()
        self.attempts: dict[str, int] = {}
        self.tokens_by_state: dict[str, int] = {}
        self.before = Books()
        """What a resumed run began with."""
        self.drops: dict[str, int] = {}
        """Groups dropped, by reason."""
        self.length_bias: float | None = None
        """Mean length of trained attempts over that of all that ended; None: none was trained."""
        self.missing_scores: dict[str, int] = {}
        self.asked_again: dict[str, int] = {}
        self.num_given_up = 0
        self.num_steps_seen = 0
        self.message = ""
        """The newest phase, warning, drop or evaluation, in words."""

    @property
    def elapsed_s(self) -> float:
        return (self._clock() if self._ended is None else self._ended) - self._started

    @property
    def books(self) -> Books:
        """As they stand."""
        return Books(
            step=self.step,
            attempts=self.attempts,
            tokens=self.tokens_by_state,
            missing_scores=self.missing_scores,
            asked_again=self.asked_again,
            num_given_up=self.num_given_up,
        )

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == events.RUN_START:
            self._started = self._clock()
            self.num_steps = int(fields.get("steps") or 0)
            self.run_dir = str(fields.get("run_dir") or "")
            self.settings = dict(fields.get("settings") or {})
            self._on_books(fields)
            self.before = self.books
        elif event == events.STEP:
            self._on_step(fields)
        elif event == events.DROP:
            reason = str(fields.get("reason", "unknown"))
            self.drops[reason] = self.drops.get(reason, 0) + 1
            self.message = message(event, fields)
        elif event == events.RUN_END:
            self._ended = self._clock()
            self._on_books(fields)
        elif event in (events.PHASE, events.WARNING, events.EVAL):
            self.message = message(event, fields)

    def close(self) -> None:
        """Nothing to release."""

    def _on_step(self, fields: Mapping[str, Any]) -> None:
        self.version = int(fields.get("version", fields["step"]))
        if fields.get("reward") is not None:
            self.rewards.append(float(fields["reward"]))
        self.lag_mean = float(fields.get("lag_mean") or 0.0)
        self.lag_max = int(fields.get("lag_max") or 0)
        self.tokens_per_s = float(fields.get("tokens_per_s") or 0.0)
        self.goodput = float(fields.get("goodput") or 0.0)
        self.num_steps_seen += 1
        self._on_books(fields)
        skipped = fields.get("skipped")
        self.message = f"step {self.step} was skipped: {skipped}" if skipped else ""

    def _on_books(self, fields: Mapping[str, Any]) -> None:
        self.step = int(fields.get("step") or self.step)
        if fields.get("roles"):
            self.roles = tuple(_role(role) for role in fields["roles"])
        if fields.get("attempts"):
            self.attempts = dict(fields["attempts"])
        if fields.get("tokens_by_state"):
            self.tokens_by_state = dict(fields["tokens_by_state"])
        if fields.get("length_bias") is not None:
            self.length_bias = float(fields["length_bias"])
        self.missing_scores = dict(fields.get("missing_scores") or self.missing_scores)
        self.asked_again = dict(fields.get("asked_again") or self.asked_again)
        self.num_given_up = int(fields.get("given_up") or self.num_given_up)


def message(event: str, fields: Mapping[str, Any]) -> str:
    """An event in words, for one line."""
    if event == events.DROP:
        detail = f" ({fields['detail']})" if fields.get("detail") else ""
        return f"dropped group {fields.get('group')}: {fields.get('reason')}{detail}"
    if event == events.EVAL:
        figures = (f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in fields.items())
        return "evaluation: " + ", ".join(figures)
    prefix = "warning: " if event == events.WARNING else ""
    return prefix + str(fields.get("text", ""))


def _ended_since(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Counts by state without what had ended before; attempts under way then, and those admitted since, are in it."""
    ended = {state for state in now if state == "trained" or state.startswith("dropped:")}
    return {state: count - (before.get(state, 0) if state in ended else 0) for state, count in now.items()}


def _grown(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Counts that have grown, by how much."""
    return {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}


def _role(role: RoleStatus | Mapping[str, Any]) -> RoleStatus:
    if isinstance(role, RoleStatus):
        return role
    return RoleStatus(
        role=role["role"],
        version=role.get("version", 0),
        progress=role.get("progress", 0),
        seconds=role["seconds"],
        counters=role.get("counters", {}),
    )
