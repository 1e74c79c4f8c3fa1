"""What people see of a run, one event a step: reward, lag, speed, and where every second went."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from headrace.errors import RoleError
from headrace.protocols import Cluster, Engine, Sink, StepScorer
from headrace.runtime.state import RunState
from headrace.types import RoleStatus, StepResult

PROCESS_STATUS_S = 2.0
"""How long a report waits for a role that the run can do without."""


class Reporter:
    def __init__(
        self,
        state: RunState,
        cluster: Cluster,
        sink: Sink,
        own_status: Callable[[], RoleStatus] | None,
        *,
        only_scoring: Sequence[Engine] = (),
        scoring: Callable[[], RoleStatus] | None = None,
        process: StepScorer | None = None,
    ) -> None:
        """``only_scoring``: engines beside those of the cluster. ``scoring`` tells where the scoring stage's time went;
        None: nobody asks. ``process`` may hang or die without ending the run: what it said last stands."""
        self._state = state
        self._cluster = cluster
        self._sink = sink
        self._process = process
        self._process_said: list[RoleStatus] = []
        self._own = [status for status in (scoring, own_status) if status is not None]
        self._engines = (*cluster.engines, *only_scoring)
        self._clock = asyncio.get_running_loop().time
        self._since = self._clock()
        self._trained_tokens = 0

    async def statuses(self) -> list[RoleStatus]:
        calls = [engine.status() for engine in self._engines]
        statuses = await asyncio.gather(*calls, self._cluster.trainer.status())
        return [*statuses, *await self._process_status(), *(status() for status in self._own)]

    async def _process_status(self) -> list[RoleStatus]:
        if self._process is None:
            return []
        try:
            async with asyncio.timeout(PROCESS_STATUS_S):
                self._process_said = [await self._process.status()]
        except (RoleError, TimeoutError):
            # Its own calls are counted as missing scores, with the reason.
            pass
        return self._process_said

    def start(self) -> None:
        """Speed is counted from here."""
        self._since = self._clock()

    async def step(self, result: StepResult, batch: Callable[[], Mapping[str, float]]) -> None:
        """``batch`` is asked once the roles have answered: by then the engines have their new requests, and the trainer
        does not wait for it."""
        self._trained_tokens += result.num_loss_tokens
        if result.warning is not None:
            self._sink.emit("warning", {"text": result.warning})
        roles = await self.statuses()
        elapsed = max(self._clock() - self._since, 1e-9)
        device_s = elapsed * (len(self._engines) + 1)
        self._sink.emit(
            "step",
            {
                "step": result.step,
                "version": result.version,
                **batch(),
                "tokens_per_s": self._trained_tokens / elapsed,
                "goodput": self._trained_tokens / device_s,
                "skipped": result.skipped,
                "metrics": dict(result.metrics),
                "roles": [asdict(role) for role in roles],
                **self.ledger(),
            },
        )

    def ledger(self) -> dict[str, Any]:
        return {
            "attempts": self._state.ledger.attempts(),
            "tokens_by_state": self._state.ledger.tokens(),
            "length_bias": self._state.ledger.length_bias(),
            "missing_scores": dict(self._state.missing_scores),
            "asked_again": dict(self._state.asked_again),
            "given_up": self._state.num_given_up,
        }
