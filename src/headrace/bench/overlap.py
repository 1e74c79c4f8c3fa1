"""What overlapping generation and training is worth on this machine.

The same work (a model of about 1M parameters, long-tailed completion lengths) is trained with ``max_lag``
0, 1, 2 and 4, interleaved and repeated, by one engine process and one trainer process of one thread
each. Reported per lag: trained tokens per second and the trainer's idle share, both in steady
state. The bound is what perfect overlap would give,

    (generation + training, at lag 0) / max(generation, training, at this lag)

in seconds a step, as the roles themselves charged them. Only ratios of one invocation mean anything on a
machine that is shared: absolute speed depends on who else is there.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from headrace import build
from headrace.config import Settings, from_dict
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.data.rendering import Renderer
from headrace.data.tasks import from_list
from headrace.launch.controller_loop import ControllerLoop
from headrace.protocols import PolicyClient
from headrace.runtime.pipeline import Pipeline
from headrace.types import Episode, Sampling, Task, Trajectory

LAGS = (0, 1, 2, 4)
STEPS = 24
SETTLING_STEPS = 8
"""Left out of every figure: the pipeline fills."""
GENERATION = ("prefill", "decode")
TRAINING = ("forward-backward", "optimizer", "publishing")
PROMPT_TOKENS = 88
"""The engine computes a prompt once for a group, the trainer for each sample: this sets their balance."""
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 24, 0.8, 160
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 >"
FILLER = "what the engine computes once for a group the trainer computes for each sample " * 4


class LongTailed:
    """One turn whose length is drawn from a log-normal distribution, the same in every run."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    async def run(self, task: Task, policy: PolicyClient) -> tuple[Trajectory, ...]:
        draw = np.random.default_rng(policy.seed).standard_normal()
        length = int(np.clip(MEDIAN_TOKENS * np.exp(SIGMA * draw), 1, MAX_TOKENS))
        turn = await policy.sample(self._renderer.prompt_ids(task), Sampling(max_tokens=length))
        return (Trajectory(turns=(turn,), text=""),)


class ParityScorer:
    """A reward that costs nothing and varies inside a group."""

    async def score(self, task: Task, episodes: Sequence[Episode]) -> list[Mapping[str, float | None]]:
        first = (e.trajectories[0].turns[0].completion.token_ids[0] for e in episodes)
        return [{"even": float(token % 2 == 0)} for token in first]

    async def close(self) -> None: ...


class StepTimes:
    """Keeps when each step ended and what the roles had done by then."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, Mapping[str, Any]]] = []

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "step":
            self.steps.append((time.perf_counter(), fields))

    def close(self) -> None: ...


def run(
    *,
    repeats: int = 3,
    seed: int = 0,
    prompt_tokens: int = PROMPT_TOKENS,
    on_run: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Figures by lag: every repeat and the medians."""
    figures: dict[int, list[dict[str, float]]] = {lag: [] for lag in LAGS}
    with tempfile.TemporaryDirectory(prefix="headrace-overlap-") as made:
        num_parameters = _make_model(Path(made) / "model", seed)
        for repeat in range(repeats):
            for lag in LAGS:
                figure = _one(Path(made), lag, repeat, seed, prompt_tokens)
                figures[lag].append(figure)
                rate, idle = figure["tokens_per_s"], figure["trainer_idle"]
                on_run(f"repeat {repeat + 1}, max_lag {lag}: {rate:,.0f} tokens/s, trainer idle {idle:.1%}")
    medians = {lag: _median(runs) for lag, runs in figures.items()}
    sync = medians[0]
    for lag, median in medians.items():
        median["speedup"] = statistics.median(
            run["tokens_per_s"] / base["tokens_per_s"]
            for run, base in zip(figures[lag], figures[0], strict=True)
        )
        slower = max(median["generation_s"], median["training_s"])
        median["bound"] = (sync["generation_s"] + sync["training_s"]) / slower
    return {
        "num_parameters": num_parameters,
        "generation_over_training": sync["generation_s"] / sync["training_s"],
        "by_lag": medians,
        "repeats": figures,
    }


def table(figures: Mapping[str, Any]) -> Table:
    ratio = figures["generation_over_training"]
    title = (
        f"{figures['num_parameters'] / 1e6:.2f}M parameters; generation takes {ratio:.2f} of training time"
    )
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in (
        "max_lag",
        "tokens/s",
        "speed-up",
        "bound",
        "trainer idle",
        "engine idle",
        "generation",
        "training",
    ):
        drawn.add_column(name, justify="right")
    for lag, row in figures["by_lag"].items():
        drawn.add_row(
            str(lag),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['speedup']:.2f}x",
            f"{row['bound']:.2f}x",
            f"{row['trainer_idle']:.1%}",
            f"{row['engine_idle']:.1%}",
            f"{row['generation_s']:.3f} s/step",
            f"{row['training_s']:.3f} s/step",
        )
    return drawn


def _make_model(directory: Path, seed: int) -> int:
    from headrace.models.loading import make_tiny_model

    build.quieten()
    vocab_size = make_char_tokenizer(directory, ALPHABET)
    model = make_tiny_model(
        directory, vocab_size=vocab_size, hidden_size=192, num_layers=2, context_tokens=512, seed=seed
    )
    return sum(p.numel() for p in model.parameters())


def _settings(model: Path, lag: int, seed: int) -> Settings:
    return from_dict(
        {
            "run.seed": seed,
            "run.steps": STEPS,
            "run.checkpoint_every": 0,
            "model.path": str(model),
            "model.device": "cpu",
            "rollout.max_lag": lag,
            "rollout.group_size": 8,
            "rollout.groups_per_step": 8,
            "rollout.max_tokens": MAX_TOKENS,
            "engine.max_running": 256,
            "trainer.learning_rate": 1e-5,
        }
    )


def _one(root: Path, lag: int, repeat: int, seed: int, prompt_tokens: int) -> dict[str, float]:
    settings = _settings(root / "model", lag, seed)
    with asyncio.Runner(loop_factory=ControllerLoop) as runner:
        times = runner.run(_train(settings, root / f"run-{repeat}-{lag}", prompt_tokens))
    return _steady(times.steps)


async def _train(settings: Settings, run_dir: Path, prompt_tokens: int) -> StepTimes:
    renderer = Renderer.from_directory(build.model_directory(settings))
    rows = [{"prompt": f"{i:04d} {FILLER[: prompt_tokens - 6]}>"} for i in range(512)]
    times = StepTimes()
    cluster = await build.cluster(settings, [], run_dir=run_dir)
    try:
        pipeline = Pipeline(
            build.plan(settings),
            cluster=cluster,
            environment=LongTailed(renderer),
            scorer=ParityScorer(),
            tasks=from_list(rows),
            run_dir=run_dir,
            sink=times,
        )
        await pipeline.run()
    finally:
        await cluster.close()
    return times


def _steady(steps: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, float]:
    """Differences between the end of the settling steps and the last step that others overlap."""
    (began, first), (ended, last) = steps[SETTLING_STEPS - 1], steps[-2]
    num_steps = len(steps) - 1 - SETTLING_STEPS
    tokens = sum(fields["tokens"] for _, fields in steps[SETTLING_STEPS:-1])
    engine, trainer = (spent(first, last, role) for role in ("engine-0", "trainer"))
    return {
        "tokens_per_s": tokens / (ended - began),
        "step_s": (ended - began) / num_steps,
        "generation_s": sum(engine[a] for a in GENERATION) / num_steps,
        "training_s": sum(trainer[a] for a in TRAINING) / num_steps,
        "trainer_idle": trainer["waiting-for-batch"] / sum(trainer.values()),
        "engine_idle": engine["idle-no-work"] / sum(engine.values()),
    }


def spent(first: Mapping[str, Any], last: Mapping[str, Any], role: str) -> dict[str, float]:
    before, after = (next(r["seconds"] for r in f["roles"] if r["role"] == role) for f in (first, last))
    return {activity: after[activity] - before[activity] for activity in after}


def _median(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}
