"""A whole step of group-relative policy optimisation on one GPU: rollouts, training, new weights.

In: a model shape, the size of a step, and the lags to run it at. Out: for each, seconds a step in steady state through
the real run (controller, engine and trainer as processes on the same GPU), what the roles spent them on, and the most
GPU memory that was in use; and the least time it can take where both take turns, at the rates measured
afterwards (``step_limit``). Completions have a fixed length; the reward is free and varies inside a group.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from headrace import build
from headrace.bench.gpu_memory import MemoryWatch
from headrace.bench.gpu_service import side_by_side
from headrace.bench.overlap import GENERATION, TRAINING, ParityScorer, StepTimes, spent
from headrace.bench.step_workload import StepWorkload
from headrace.config import Settings, from_dict
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.data.tasks import from_list
from headrace.errors import ConfigError
from headrace.launch.controller_loop import ControllerLoop
from headrace.protocols import PolicyClient
from headrace.runtime.pipeline import Pipeline
from headrace.types import Sampling, Task, Trajectory

_SETTLING_STEPS = 2
"""Left out of every figure: compiling, and the pipeline filling."""


class FixedLength:
    """One turn of random prompt tokens and a completion of fixed length."""

    def __init__(self, workload: StepWorkload, vocab_size: int) -> None:
        self._workload = workload
        self._vocab_size = vocab_size
        self._sampling = Sampling(max_tokens=workload.completion_tokens)
        self._last: tuple[Task, np.ndarray] | None = None
        """A group's attempts begin one after the other and are shown one prompt, as those of any environment."""

    async def run(self, task: Task, policy: PolicyClient) -> tuple[Trajectory, ...]:
        if self._last is None or self._last[0] is not task:
            self._last = (task, self._prompt_ids(task))
        turn = await policy.sample(self._last[1], self._sampling)
        return (Trajectory(turns=(turn,), text=""),)

    def _prompt_ids(self, task: Task) -> np.ndarray:
        rng = np.random.default_rng(int(task.columns["number"]))
        return rng.integers(0, self._vocab_size, self._workload.prompt_tokens).astype(np.int32)


class ToldSteps(StepTimes):
    """Also says how long each step took, while the run goes on."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        super().__init__()
        self._progress = progress
        self._last = time.perf_counter()

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        super().emit(event, fields)
        if event == "step":
            now = time.perf_counter()
            self._progress(f"step {len(self.steps)}: {now - self._last:.2f} s")
            self._last = now


def run(
    shape: str = "qwen2-1.5b",
    *,
    workload: StepWorkload | None = None,
    against: str | None = None,
    peer_python: Path | None = None,
    max_lags: Sequence[int] = (0,),
    steps: int = 5,
    row_tokens: int = 12288,
    offload: str = "none",
    device: str = "cuda",
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All figures as plain numbers by side; ``steps`` are measured after the settling ones. On a CPU the same run is
    timed, and no memory is watched."""
    workload = workload or StepWorkload()
    if against not in (None, "trl"):
        raise ConfigError(f"--against {against}: only trl can be run beside a whole step")
    if against == "trl":
        from headrace.bench import step_with_trl

        step_with_trl.check_installed(peer_python)
    with tempfile.TemporaryDirectory(prefix="headrace-step-") as made:
        model = Path(made) / "model"
        progress(f"writing a random {shape}")
        environment = FixedLength(workload, write_checkpoint(model, shape, device))
        ours = []
        for max_lag in max_lags:
            progress(f"running Headrace, max_lag {max_lag}")
            settings = _settings(model, workload, max_lag, steps, row_tokens, offload, device)
            run_dir = Path(made) / f"run-{max_lag}"
            with (
                _sharing(run_dir, max_lag, progress) as is_side_by_side,
                MemoryWatch() as memory,
                asyncio.Runner(loop_factory=ControllerLoop) as runner,
            ):
                times = runner.run(_train(settings, run_dir, environment, progress))
            shared = {"side_by_side": is_side_by_side, "peak_bytes": memory.peak_bytes}
            ours.append({"max_lag": max_lag, **_steady(times), **shared})
            progress(_told(f"headrace, max_lag {max_lag}", ours[-1]))
        figures: dict[str, Any] = {
            "shape": shape,
            **asdict(workload),
            "row_tokens": row_tokens,
            "offload": offload,
            "headrace": ours,
        }
        if against == "trl":
            figures["trl"] = _with_trl(model, workload, steps, progress, peer_python)
    return figures | _limit(shape, workload, device)


def _sharing(run_dir: Path, max_lag: int, progress: Callable[[str], None]) -> AbstractContextManager[bool]:
    """At lag 0 engine and trainer take turns anyway."""
    run_dir.mkdir()
    return side_by_side(run_dir / "gpu-service.log", progress=progress) if max_lag else nullcontext(False)


def _limit(shape: str, workload: StepWorkload, device: str) -> dict[str, float]:
    """What the GPU could do, measured when the sides are done: what it takes to measure stays with this process."""
    from headrace.bench.rates import copy_bandwidth, matmul_flops_per_s
    from headrace.bench.shapes import shape_config
    from headrace.bench.step_limit import step_limit

    bandwidth, rate = copy_bandwidth(device), matmul_flops_per_s(device)
    limit = step_limit(shape_config(shape), workload, bytes_per_s=bandwidth, flops_per_s=rate)
    return {
        "bandwidth_bytes_per_s": bandwidth,
        "matmul_flops_per_s": rate,
        "limit_generation_s": limit.generation_s,
        "limit_training_s": limit.training_s,
        "limit_s": limit.seconds,
    }


def _steady(times: StepTimes) -> dict[str, Any]:
    steady = times.steps[_SETTLING_STEPS - 1 :]
    first, last = steady[0][1], steady[-1][1]
    engine, trainer = (spent(first, last, role) for role in ("engine-0", "trainer"))
    taken = [b - a for (a, _), (b, _) in pairwise(steady)]
    return {
        "seconds": statistics.median(taken),
        "all_seconds": taken,
        "generation_s": sum(engine[a] for a in GENERATION) / len(taken),
        "training_s": sum(trainer[a] for a in TRAINING) / len(taken),
        "engine_seconds": engine,
        "trainer_seconds": trainer,
        "metrics": {k: v for k, v in last.items() if isinstance(v, int | float)},
    }


def _with_trl(
    model: Path,
    workload: StepWorkload,
    steps: int,
    progress: Callable[[str], None],
    peer_python: Path | None = None,
) -> dict[str, Any]:
    """TRL's better time, where it has one, with every set-up that was tried and why one failed, if it did."""
    from headrace.bench import step_with_trl

    tried: list[dict[str, Any]] = []
    for checkpointing in (True, False):
        progress(f"running TRL with vLLM, gradient checkpointing {'on' if checkpointing else 'off'}")
        try:
            tried.append(
                step_with_trl.run(
                    model, workload, steps=steps, checkpointing=checkpointing, python=peer_python
                )
            )
            progress(_told("trl", tried[-1]))
        except ConfigError as error:
            tried.append({"checkpointing": checkpointing, "failed": str(error)})
            progress(f"trl: failed, {str(error)[-300:]}")
    done = [one for one in tried if "seconds" in one]
    # What was measured of the other side is not lost with it.
    return {**min(done, key=lambda one: one["seconds"], default={}), "tried": tried}


def _told(side: str, row: Mapping[str, Any]) -> str:
    parts = [f", {name[:-2]} {row[name]:.2f} s" for name in ("generation_s", "training_s") if name in row]
    memory = f"at most {row['peak_bytes'] / 1e9:.1f} GB in use"
    return f"{side}: {row['seconds']:.2f} s a step{''.join(parts)}, {memory}"


def table(figures: Mapping[str, Any]) -> Table:
    """The figures for people; each of ours against TRL's better time, where it has one."""
    title = (
        f"{figures['shape']}: the limit where both take turns, {figures['limit_s']:.2f} s a step, is\n"
        f"{figures['limit_generation_s']:.2f} s of generating, then {figures['limit_training_s']:.2f} s of training"
    )
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    drawn.add_column("side")
    columns = ("seconds a step", "of the limit", "generation", "training", "peak memory", "against TRL")
    for name in columns:
        drawn.add_column(name, justify="right")
    trl = figures.get("trl", {})
    for row in figures["headrace"]:
        quicker = f"{trl['seconds'] / row['seconds']:.2f}x" if "seconds" in trl else ""
        how = ", side by side" if row["side_by_side"] else ""
        drawn.add_row(f"headrace, max_lag {row['max_lag']}{how}", *_cells(row, figures["limit_s"]), quicker)
    for row in trl.get("tried", ()):
        if "seconds" in row:
            side = f"trl, gradient checkpointing {'on' if row['checkpointing'] else 'off'}"
            drawn.add_row(side, *_cells(row, figures["limit_s"]), "")
    return drawn


def _cells(row: Mapping[str, Any], limit_s: float) -> list[str]:
    parts = [f"{row[name]:.2f} s" if name in row else "" for name in ("generation_s", "training_s")]
    memory = f"{row['peak_bytes'] / 1e9:.1f} GB"
    share = "" if row.get("max_lag") else f"{limit_s / row['seconds']:.0%}"
    return [f"{row['seconds']:.2f}", share, *parts, memory]


def write_checkpoint(directory: Path, shape: str, device: str = "cuda") -> int:
    """A random model of the shape with a tokenizer beside it; returns its vocabulary's size."""
    import torch

    from headrace.bench.shapes import create_random_model

    build.quieten()
    make_char_tokenizer(directory, "ab")
    model = create_random_model(shape, device=device)
    model.save_pretrained(directory)
    vocab_size = int(model.config.vocab_size)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return vocab_size


def _settings(
    model: Path,
    workload: StepWorkload,
    max_lag: int,
    steps: int,
    row_tokens: int,
    offload: str,
    device: str,
) -> Settings:
    return from_dict(
        {
            "run.steps": steps + _SETTLING_STEPS,
            "run.checkpoint_every": 0,
            "model.path": str(model),
            "model.device": device,
            "model.dtype": "bfloat16",
            "rollout.max_lag": max_lag,
            "rollout.group_size": workload.group_size,
            "rollout.groups_per_step": workload.num_groups,
            "rollout.max_tokens": workload.completion_tokens,
            "rollout.drop_zero_variance": False,
            # What a step's samples need, prompts once a group, and a little over: the rest is the trainer's.
            "engine.kv_tokens": _kv_tokens(workload),
            "trainer.learning_rate": 1e-6,
            "trainer.row_tokens": row_tokens,
            "trainer.offload": offload,
        }
    )


def _kv_tokens(workload: StepWorkload) -> int:
    completions = workload.group_size * (workload.completion_tokens + 32)
    return workload.num_groups * (workload.prompt_tokens + completions)


async def _train(
    settings: Settings, run_dir: Path, environment: FixedLength, progress: Callable[[str], None]
) -> ToldSteps:
    rows = [{"prompt": "a", "number": i} for i in range(4096)]
    times = ToldSteps(progress)
    progress("starting engine and trainer")
    cluster = await build.cluster(settings, [], run_dir=run_dir)
    try:
        progress("running")
        pipeline = Pipeline(
            build.plan(settings),
            cluster=cluster,
            environment=environment,
            scorer=ParityScorer(),
            tasks=from_list(rows),
            run_dir=run_dir,
            sink=times,
        )
        await pipeline.run()
    finally:
        await cluster.close()
    return times
