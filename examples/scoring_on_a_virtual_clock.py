"""How much of the scoring hides behind generation, on a clock that only moves when everything waits.

    python examples/scoring_on_a_virtual_clock.py

The real runtime with scripted parts: up to 16 attempts a step at 50 tokens a second each, lengths from 2 to 64, and a
process-reward model that reads one attempt at a time. Its steps are scored while attempts go on, or all at their end.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np

from headrace.data.steps import StepRule
from headrace.engines.scripted import ScriptedEngine, hashed_script
from headrace.observe.progress import Progress
from headrace.observe.verdict import hidden_share
from headrace.plan import virtual_clock
from headrace.runtime.pipeline import Pipeline
from headrace.runtime.plan import ProcessPlan, RunPlan
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import RoleStatus, Sampling, StepQuestion, StepScores, Task, Trajectory


class Tasks:
    def task(self, index):
        return Task(id=str(index), prompt="")

    def __len__(self):
        return 1000


class OneTurn:
    async def run(self, task, policy):
        turn = await policy.sample(np.array([int(task.id)], np.int32), Sampling(max_tokens=64))
        return (Trajectory(turns=(turn,), text=""),)


class Reward:
    async def score(self, task, episodes):
        return [{"even": float(e.num_tokens % 2 == 0)} for e in episodes]


class Cluster:
    def __init__(self):
        engine = ScriptedEngine(script=hashed_script(mean_tokens=40), token_s=0.02)
        self.engines, self.trainer = [engine], ScriptedTrainer(token_s=0.0005)

    async def wait_failure(self):
        return await asyncio.get_running_loop().create_future()


class Judge:
    """Takes its time for tokens it has not read, one attempt after the other."""

    def __init__(self, tokens_per_s: int) -> None:
        self._tokens_per_s, self._busy, self._read = tokens_per_s, asyncio.Lock(), {}

    async def score_steps(self, question: StepQuestion) -> StepScores:
        async with self._busy:
            new = len(question.token_ids) - self._read.get(question.attempt, 0)
            await asyncio.sleep(new / self._tokens_per_s)
            self._read[question.attempt] = len(question.token_ids)
        return StepScores(scores=np.zeros(len(question.ends) - question.num_known, np.float32))

    async def status(self):
        return RoleStatus(role="process", version=0, progress=0, seconds={})


async def run(max_lag: int, step_tokens: int | None, tokens_per_s: int = 1000) -> tuple[float, float, float]:
    """(seconds of the run, hidden share, mean seconds a group is held for scores); no ``step_tokens``: no judge."""
    rule = StepRule(kind="tokens", num_tokens=step_tokens or 1)
    plan = RunPlan(
        steps=20, groups_per_step=4, group_size=4, max_lag=max_lag, checkpoint_every=0,
        process=ProcessPlan(rule=rule) if step_tokens else None,
    )  # fmt: skip
    progress = Progress()
    with tempfile.TemporaryDirectory() as run_dir:
        pipeline = Pipeline(
            plan, cluster=Cluster(), environment=OneTurn(), scorer=Reward(), tasks=Tasks(), run_dir=Path(run_dir),
            sink=progress, process=Judge(tokens_per_s) if step_tokens else None,
        )  # fmt: skip
        await pipeline.run()
    (role,) = [role for role in progress.roles if role.role == "scoring"]
    held_s = role.counters["held_s"] / role.counters["groups"]
    return asyncio.get_running_loop().time(), hidden_share(role.seconds), held_s


if __name__ == "__main__":
    print("max_lag  judge reads      run      hidden  a group is held")
    for max_lag in (0, 1, 2):
        for name, step_tokens in (("nothing", None), ("at the end", 10**6), ("every 5 tokens", 5)):
            seconds, hidden, held_s = virtual_clock.run(run(max_lag, step_tokens))
            print(f"{max_lag:7}  {name:14} {seconds:5.1f} s   {hidden:7.1%}  {1000 * held_s:6.0f} ms")
