"""All roles in this process: for debugging, tests and runs that must repeat bit for bit.

In: role objects. Out: the surface of ``local.LocalCluster`` over them. An exception in a role reaches
its caller directly, so there is no death to wait for.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.errors import RoleError
from headrace.protocols import Engine, Scorer, StepScorer, Trainer
from headrace.types import RoleStatus


class InlineCluster:
    def __init__(
        self,
        engines: Sequence[Engine],
        trainer: Trainer | None,
        scorers: Sequence[Scorer] = (),
        *,
        reference: Engine | None = None,
        teachers: Mapping[str, Engine] | None = None,
        step_scorer: StepScorer | None = None,
        directory: Path | None = None,
    ) -> None:
        """``trainer`` None: nothing is trained (an evaluation). ``reference``: an engine that keeps the starting
        weights. ``teachers``: engines that are imitated, by name. ``step_scorer``: a process-reward model.
        ``directory``: of the weight segments, removed at the end."""
        self._directory = directory
        self.engines = tuple(engines)
        self.scorers = tuple(scorers)
        self.reference = reference
        self.step_scorer = step_scorer
        self.teachers = dict(teachers or {})
        self._trainer = trainer

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise RoleError("this cluster was started without a trainer; give it one to train")
        return self._trainer

    @property
    def _all_engines(self) -> tuple[Engine, ...]:
        others = () if self.reference is None else (self.reference,)
        return (*self.engines, *others, *self.teachers.values())

    async def statuses(self) -> Mapping[str, RoleStatus]:
        """What each role that has a status says of itself now."""
        statuses = [await engine.status() for engine in self._all_engines]
        if self._trainer is not None:
            statuses.append(await self._trainer.status())
        return {status.role: status for status in statuses}

    async def wait_failure(self) -> RoleError:
        """Never returns: nothing here can die alone."""
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Close every role, also after one of them failed to; the first failure is raised."""
        closes = [engine.close() for engine in self._all_engines]
        closes.extend(scorer.close() for scorer in self.scorers)
        if self.step_scorer is not None:
            closes.append(self.step_scorer.close())
        if self._trainer is not None:
            closes.append(self._trainer.close())
        outcomes = await asyncio.gather(*closes, return_exceptions=True)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
