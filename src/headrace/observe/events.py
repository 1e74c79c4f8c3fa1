"""What happens in a run, as events for people.

An event is a name and a mapping of plain values; every sink gets every event, in order:

    run.start   steps, run_dir, settings (by name, those that the verdict depends on);
                what a resumed run begins with: the step, and what a step has of attempts, tokens_by_state and scores
    phase       text: what the run is busy with before and between steps (``saving the checkpoint of step 50``)
    step        step, version, skipped, reward, lag_mean, lag_max, age_spread, tokens, tokens_per_s, goodput,
                metrics (by name), roles (``RoleStatus`` as mappings), attempts and tokens_by_state
                (by ledger state), length_bias, missing_scores and asked_again (by source and reason), given_up
                (attempts ended early)
    drop        reason, group, detail; traceback: of the first fault of its kind
    warning     text; traceback: as of a drop
    eval        step and figures by name
    run.end     the step, and what the last step had of roles, attempts, tokens_by_state and scores, if it has changed
                since

Nothing in the library decides by an event: control signals are fields of types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.protocols import Sink

RUN_START = "run.start"
PHASE = "phase"
STEP = "step"
DROP = "drop"
WARNING = "warning"
EVAL = "eval"
RUN_END = "run.end"


class Fanout:
    """One sink that hands every event to several, in the order given."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.emit(event, fields)

    def close(self) -> None:
        """Close every sink, also when one fails; the first failure is raised at the end."""
        failures: list[Exception] = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
