"""A controller for tests that kill it: ``kill_program.py RUN_DIR --steps N ...``.

The real pipeline on a real event loop, with two scripted engines and a scripted trainer as processes. It
says on standard output what it is about to do, one line each (``KIND DETAIL``), so that a test can
choose a moment by counting lines. It ends as the command line does: 0 when the run is complete, 130
when it was interrupted, and one sentence on standard error with another code when something failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.engines.scripted import ScriptedEngine, hashed_script
from headrace.errors import HeadraceError, RewardError
from headrace.launch.local import LocalLauncher, RoleSpec
from headrace.runtime.pipeline import Pipeline
from headrace.runtime.plan import RunPlan
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import Episode, Sampling, Task, Trajectory
from headrace.weights.shared_memory import SharedMemorySender, create_segment_directory
from headrace.weights.transports import TransportReceiver

GROUP_SIZE = 3
GROUPS_PER_STEP = 2
INTERRUPTED = 130


def say(kind: str, detail: object = "") -> None:
    print(kind, detail, flush=True)


def engine(settings: Mapping[str, Any]) -> ScriptedEngine:
    return ScriptedEngine(
        settings["name"],
        script=hashed_script(mean_tokens=12),
        receiver=TransportReceiver(),
        token_s=0.001,
    )


def trainer(settings: Mapping[str, Any]) -> ScriptedTrainer:
    return ScriptedTrainer(sender=SharedMemorySender(Path(settings["segments"])), token_s=0.0001)


class Tasks:
    def task(self, index: int) -> Task:
        return Task(id=str(index), prompt=f"task {index}", columns={})

    def __len__(self) -> int:
        return 1_000_000


class OneTurn:
    """One completion of at most 32 tokens; the prompt is the task's number."""

    async def run(self, task: Task, policy: Any) -> tuple[Trajectory, ...]:
        say("attempt", task.id)
        turn = await policy.sample(np.array([int(task.id)], np.int32), Sampling(max_tokens=32))
        return (Trajectory(turns=(turn,), text=""),)


class ParityScorer:
    """Rewards an even first token; cannot score some tasks, always the same ones."""

    async def score(self, task: Task, episodes: Sequence[Episode]) -> list[Mapping[str, float | None]]:
        say("score", task.id)
        if int(task.id) % 7 == 5:
            raise RewardError(f"task {task.id} has no score")
        firsts = [episode.trajectories[0].turns[0].completion.token_ids[0] for episode in episodes]
        return [{"even": float(first % 2 == 0)} for first in firsts]

    async def close(self) -> None: ...


class LineSink:
    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        say(event, fields.get("text", ""))

    def close(self) -> None: ...


def roles(segments: Path) -> list[RoleSpec]:
    engines = [
        RoleSpec(name=name, kind="engine", factory="kill_program:engine", settings={"name": name})
        for name in ("engine-0", "engine-1")
    ]
    settings = {"segments": str(segments)}
    return [
        *engines,
        RoleSpec(name="trainer", kind="trainer", factory="kill_program:trainer", settings=settings),
    ]


async def main(options: argparse.Namespace) -> int:
    say("spawn")
    directory = create_segment_directory()
    launcher = LocalLauncher(
        roles(directory / "weights"), log_dir=options.run_dir / "logs", directory=directory
    )
    cluster = await launcher.spawn()
    try:
        pipeline = Pipeline(
            RunPlan(
                steps=options.steps,
                group_size=GROUP_SIZE,
                groups_per_step=GROUPS_PER_STEP,
                max_lag=1,
                staleness=options.staleness,
                drop_zero_variance=options.staleness == "drop",
                interrupt=options.interrupt,
                checkpoint_every=3,
                error_budget=1.0,
            ),
            cluster=cluster,
            environment=OneTurn(),
            scorer=ParityScorer(),
            tasks=Tasks(),
            run_dir=options.run_dir,
            sink=LineSink(),
        )
        with stop_on_signal(pipeline) if options.interruptible else contextlib.nullcontext():
            say("started")
            state = await pipeline.run()
        counters = [(await engine.status()).counters for engine in cluster.engines]
    finally:
        await cluster.close()
    say("end", json.dumps({"engine_tokens": sum(c["generated_tokens"] for c in counters)}))
    return 0 if state.step == options.steps else INTERRUPTED


def stop_on_signal(pipeline: Pipeline) -> contextlib.AbstractContextManager[None]:
    """As ``headrace.train`` stops; imported only where it is used, since every life pays for its imports."""
    from headrace.api import _stop_on_signal

    return _stop_on_signal(pipeline, LineSink())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--staleness", default="pace")
    parser.add_argument("--interrupt", default="never")
    parser.add_argument("--interruptible", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main(parse())))
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
