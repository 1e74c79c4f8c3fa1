"""A whole run on the virtual clock: the real runtime with the public fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.engines.scripted import ScriptedEngine
from headrace.runtime.pipeline import Pipeline
from headrace.runtime.plan import RunPlan
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import Episode, Sampling, Task, Trajectory


class CountingTasks:
    def task(self, index: int) -> Task:
        return Task(id=str(index), prompt=f"task {index}", columns={"answer": index})

    def __len__(self) -> int:
        return 1000


class OneTurn:
    """The smallest environment: the prompt is the task's number."""

    def __init__(self, max_tokens: int = 32) -> None:
        self._sampling = Sampling(max_tokens=max_tokens)

    async def run(self, task: Task, policy: Any) -> tuple[Trajectory, ...]:
        turn = await policy.sample(np.array([int(task.id)], np.int32), self._sampling)
        return (Trajectory(turns=(turn,), text=""),)


class ParityScorer:
    """Rewards 1 for an even first token."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    async def score(self, task: Task, episodes: Sequence[Episode]) -> list[Mapping[str, float | None]]:
        await asyncio.sleep(self._seconds)
        return [
            {"even": float(e.trajectories[0].turns[0].completion.token_ids[0] % 2 == 0)} for e in episodes
        ]

    async def close(self) -> None: ...


class Cluster:
    def __init__(self, engines: Sequence[Any], trainer: Any) -> None:
        self.engines = engines
        self.trainer = trainer

    async def wait_failure(self) -> Exception:
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None: ...


class MemorySink:
    def __init__(self) -> None:
        self.events: list[tuple[str, Mapping[str, Any]]] = []

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        self.events.append((event, fields))

    def of(self, event: str) -> list[Mapping[str, Any]]:
        return [fields for name, fields in self.events if name == event]

    def close(self) -> None: ...


def make_plan(**changes: Any) -> RunPlan:
    base = {
        "steps": 6,
        "group_size": 3,
        "groups_per_step": 2,
        "max_lag": 1,
        "checkpoint_every": 2,
        "attempt_s": 1e3,
        "sync_s": 1e3,
        "stall_s": 1e3,
    }
    return RunPlan(**{**base, **changes})


def make_pipeline(
    run_dir: Path,
    plan: RunPlan,
    *,
    engines: Sequence[Any] | None = None,
    trainer: Any = None,
    environment: Any = None,
    scorer: Any = None,
    sink: Any = None,
    reference: Any = None,
    sources: Sequence[Any] = (),
    process: Any = None,
    teachers: Any = None,
    tasks: Any = None,
) -> Pipeline:
    """Call inside a running loop."""
    return Pipeline(
        plan,
        cluster=Cluster(
            engines if engines is not None else [ScriptedEngine()],
            trainer if trainer is not None else ScriptedTrainer(),
        ),
        environment=environment or OneTurn(),
        scorer=scorer or ParityScorer(),
        tasks=tasks or CountingTasks(),
        run_dir=run_dir,
        sink=sink or MemorySink(),
        reference=reference,
        sources=sources,
        process=process,
        teachers=teachers,
    )
