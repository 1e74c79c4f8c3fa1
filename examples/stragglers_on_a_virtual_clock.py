"""What a step waits for when answers have a long tail, on a clock that only moves when everything waits.

    python examples/stragglers_on_a_virtual_clock.py

The real runtime with scripted parts: 8 groups of 8 attempts a step at 50 tokens a second each, lengths log-normal with
a median of 40 and a tenth above 200. One token is trained in 0.1 ms. The table compares settings of
``rollout``: seconds of a step, mean lag of trained tokens, mean ``age_spread`` of a batch, and the length bias.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np

from headrace.engines.scripted import ScriptedEngine
from headrace.plan import virtual_clock
from headrace.runtime.pipeline import Pipeline
from headrace.runtime.plan import RunPlan
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import Sampling, Task, Trajectory

STEPS = 30
MAX_TOKENS = 2000
SETTINGS = (
    {"max_lag": 0},
    {"max_lag": 1},
    {"max_lag": 4},
    {"max_lag": 4, "over_provision": 1.0},
    {"max_lag": 4, "over_provision": 1.25},
    {"max_lag": 4, "over_provision": 1.5},
    {"max_lag": 4, "over_provision": 2.0},
    {"max_lag": 1, "quorum": 0.75},
    {"max_lag": 4, "over_provision": 1.25, "quorum": 0.75},
    {"max_lag": 1, "staleness": "drop"},
    {"max_lag": 1, "staleness": "drop", "quorum": 0.75},
    {"max_lag": 4, "over_provision": 1.25, "drop_zero_variance": True},
)


def script(request):
    draw = np.random.default_rng(request.seed)
    length = int(np.clip(40 * draw.lognormal(0.0, 1.256), 1, request.sampling.max_tokens))
    return draw.integers(0, 100, length).astype(np.int32)


class Tasks:
    def task(self, index):
        return Task(id=str(index), prompt="")

    def __len__(self):
        return 1000


class OneTurn:
    async def run(self, task, policy):
        turn = await policy.sample(np.array([int(task.id)], np.int32), Sampling(max_tokens=MAX_TOKENS))
        return (Trajectory(turns=(turn,), text=""),)


class Reward:
    """Of four attempts, one succeeds."""

    async def score(self, task, episodes):
        return [
            {"right": float(e.trajectories[0].turns[0].completion.token_ids[0] % 4 == 0)} for e in episodes
        ]


class Cluster:
    def __init__(self):
        engine = ScriptedEngine(script=script, token_s=0.02, chunk_tokens=20)
        self.engines, self.trainer = [engine], ScriptedTrainer(token_s=0.0001)

    async def wait_failure(self):
        return await asyncio.get_running_loop().create_future()


class Steps:
    """Keeps what every step told of its batch."""

    def __init__(self):
        self.told = []

    def emit(self, event, fields):
        if event == "step":
            self.told.append(fields)


async def row(settings: dict) -> str:
    plan = RunPlan(steps=STEPS, groups_per_step=8, group_size=8, checkpoint_every=0, **settings)
    steps = Steps()
    with tempfile.TemporaryDirectory() as run_dir:
        pipeline = Pipeline(
            plan, cluster=Cluster(), environment=OneTurn(), scorer=Reward(), tasks=Tasks(), run_dir=Path(run_dir),
            sink=steps,
        )  # fmt: skip
        state = await pipeline.run()
    state.ledger.check()
    step_s = asyncio.get_running_loop().time() / STEPS
    lag, spread = (np.mean([told[name] for told in steps.told]) for name in ("lag_mean", "age_spread"))
    tokens = state.ledger.tokens()
    lost = sum(count for name, count in tokens.items() if name in ("dropped:stale", "dropped:cancelled"))
    name = ", ".join(f"{key} {value}" for key, value in settings.items())
    bias = state.ledger.length_bias()
    return f"{name:56} {step_s:6.1f} s  {lag:5.2f}  {spread:6.2f}  {bias:11.3f}  {lost / sum(tokens.values()):6.1%}"


if __name__ == "__main__":
    print(f"{'rollout':56}     step    lag  spread  length bias  untrained")
    for settings in SETTINGS:
        print(virtual_clock.run(row(settings)))
