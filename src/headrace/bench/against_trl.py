"""The whole loop against TRL's GRPOTrainer: same model, tasks, reward, batch and the same two cores.

In: how often to repeat and a seed. Out: samples per second of generation, reward and training together, by
side, each the median of runs that take turns, and the ratio to TRL at its better thread count. Every run
is a process of its own, held to the same cores, and is timed between two optimizer steps: what comes
before (imports, start-up, first steps) and after (the last steps, for which nothing is generated any
more) is not counted on either side. Both sides take the tasks in the same order, and every step of either
trains the same number of samples, which is checked; tokens per sample and the mean reward are reported, so
that equal work can be seen.

TRL runs its fastest way on a CPU: ``model.generate`` (not its continuous batching), float32, no gradient
checkpointing, one generation and one optimizer step per batch, no logging, saving or evaluation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from headrace.errors import ConfigError, DeadlineError, HeadraceError, InvariantError

LETTERS = "abcdefghij"
GROUP_SIZE = 8
GROUPS_PER_STEP = 16
SAMPLES_PER_STEP = GROUP_SIZE * GROUPS_PER_STEP
LEARNING_RATE = 3e-4
CLIP = 0.2
NUM_TASKS = 4096
MAX_LAGS = (1, 0)
SUPERVISED_STEPS = 300
"""Enough for answers to end where their word ends, so that both sides generate the same lengths."""

WARM_UP_STEPS = 10
COOL_DOWN_STEPS = max(MAX_LAGS) + 1
"""Steps whose samples were all admitted before the last measured one ended."""
NUM_CORES = 2
RUN_DEADLINE_S = 1800.0
BUSY_LOAD = 0.7
"""Load average above which other work disturbs the runs."""
PEER_PACKAGES = ("trl", "accelerate", "datasets")

Side = Literal["headrace", "trl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How long the words are. An answer is as long as its word, so this is also the spread of completions."""

    median: int
    sigma: float
    """Of a log-normal distribution."""
    shortest: int
    longest: int

    @property
    def max_tokens(self) -> int:
        return self.longest + 8

    def length(self, draw: random.Random) -> int:
        length = round(self.median * math.exp(self.sigma * draw.gauss(0.0, 1.0)))
        return min(max(length, self.shortest), self.longest)


WORKLOADS = {
    "even": Workload(median=16, sigma=0.3, shortest=8, longest=24),
    "long-tailed": Workload(median=12, sigma=0.9, shortest=2, longest=96),
}
"""The longest completion of a batch is about 1.5 times the mean in the first, 6 times in the second, which is
what completions of reasoning models look like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to run one side; ``None``: not a setting of that side."""

    side: Side
    trl_threads: int | None = None
    max_lag: int | None = None

    @property
    def name(self) -> str:
        if self.side == "trl":
            return f"trl, {self.trl_threads} thread" + ("s" if self.trl_threads != 1 else "")
        return f"headrace, max_lag {self.max_lag}"


CASES = (
    Case(side="trl", trl_threads=1),
    Case(side="trl", trl_threads=2),
    *(Case(side="headrace", max_lag=lag) for lag in MAX_LAGS),
)


@dataclass(slots=True)
class Record:
    """What a side noted at every optimizer step."""

    times: list[float]
    num_samples: list[int]
    num_tokens: list[int]
    rewards: list[float]


def run(
    *,
    repeats: int = 3,
    seed: int = 0,
    measured_steps: int = 40,
    workload: str = "long-tailed",
    on_run: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All figures as plain numbers; ``on_run`` hears one line about every run."""
    require()
    if workload not in WORKLOADS:
        raise ConfigError(f"--workload {workload} is unknown; choose one of {', '.join(WORKLOADS)}")
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        on_run(f"warning: other work keeps {load:.1f} cores busy; these figures will not be worth much")
    runs: dict[str, list[dict[str, float]]] = {case.name: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as made:
        directory = Path(made)
        prepare(directory, WORKLOADS[workload], seed=seed)
        for repeat in range(repeats):
            for case in turns(CASES, repeat):
                record = _run_case(case, directory, workload, steps=measured_steps, seed=seed + repeat)
                figures = rate(record, first=WARM_UP_STEPS, last=WARM_UP_STEPS + measured_steps)
                runs[case.name].append(figures)
                on_run(f"{repeat + 1}/{repeats}  {case.name:<20}  {figures['samples_per_s']:8.1f} samples/s")
    return {
        **compare(runs),
        "samples_per_step": SAMPLES_PER_STEP,
        "group_size": GROUP_SIZE,
        "workload": workload,
        "max_tokens": WORKLOADS[workload].max_tokens,
        "measured_steps": measured_steps,
        "repeats": repeats,
        "num_cores": len(cores()),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")},
    }


def table(figures: Mapping[str, Any]) -> Table:
    view = Table(
        title=f"Whole loop, {figures['workload']} lengths, {figures['num_cores']} cores, "
        f"{figures['samples_per_step']} samples a step, "
        f"median of {figures['repeats']}",
        caption=f"Headrace at max_lag 1 against {figures['best_trl']}: {figures['ratio']:.2f} times; "
        f"at max_lag 0: {figures['ratio_synchronous']:.2f} times",
    )
    view.add_column("side")
    for heading in ("samples/s", "lowest", "highest", "s/step", "tokens/sample", "reward"):
        view.add_column(heading, justify="right")
    for case in figures["cases"]:
        view.add_row(
            case["name"],
            f"{case['samples_per_s']:.0f}",
            f"{case['lowest']:.0f}",
            f"{case['highest']:.0f}",
            f"{figures['samples_per_step'] / case['samples_per_s']:.3f}",
            f"{case['tokens_per_sample']:.2f}",
            f"{case['reward']:.3f}",
        )
    return view


def require(packages: Sequence[str] = PEER_PACKAGES) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"bench trl needs {', '.join(missing)}, not installed here: install Headrace's extra bench"
        )


def turns(cases: Sequence[Case], repeat: int) -> list[Case]:
    """The cases in another order each time, so that no side always runs first."""
    start = repeat % len(cases)
    return [*cases[start:], *cases[:start]]


def cores() -> list[int]:
    """The cores every run is held to; on systems without affinity, as many as are counted."""
    if sys.platform != "linux":
        return list(range(min(NUM_CORES, os.cpu_count() or 1)))
    return sorted(os.sched_getaffinity(0))[:NUM_CORES]


def rate(record: Record, *, first: int, last: int) -> dict[str, float]:
    """Figures between the end of step ``first`` and the end of step ``last``, the first step being 1."""
    if not 1 <= first < last <= len(record.times):
        raise InvariantError(f"steps {first} to {last} were to be timed, but {len(record.times)} were noted")
    wrong = {num for num in record.num_samples if num != SAMPLES_PER_STEP}
    if wrong:
        raise InvariantError(f"a step trained {wrong.pop()} samples where {SAMPLES_PER_STEP} were to be")
    counted = slice(first, last)
    num_samples = sum(record.num_samples[counted])
    return {
        "samples_per_s": num_samples / (record.times[last - 1] - record.times[first - 1]),
        "tokens_per_sample": sum(record.num_tokens[counted]) / num_samples,
        "reward": statistics.fmean(record.rewards[counted]),
    }


def compare(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Medians by case, and Headrace's over the better of TRL's."""
    summary = []
    for case in CASES:
        rates = [figures["samples_per_s"] for figures in runs[case.name]]
        summary.append(
            {
                "name": case.name,
                **asdict(case),
                "samples_per_s": statistics.median(rates),
                "lowest": min(rates),
                "highest": max(rates),
                "tokens_per_sample": statistics.fmean(f["tokens_per_sample"] for f in runs[case.name]),
                "reward": statistics.fmean(f["reward"] for f in runs[case.name]),
                "runs": rates,
            }
        )
    best = max((case for case in summary if case["side"] == "trl"), key=lambda case: case["samples_per_s"])
    ratios = {
        case["max_lag"]: case["samples_per_s"] / best["samples_per_s"]
        for case in summary
        if case["side"] == "headrace"
    }
    return {"cases": summary, "best_trl": best["name"], "ratio": ratios[1], "ratio_synchronous": ratios[0]}


def tasks(num: int, workload: Workload, *, seed: int) -> list[dict[str, str]]:
    """Words of different lengths to reverse, with the right answer beside them."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(LETTERS, k=workload.length(draw))) for _ in range(num)]
    return [{"prompt": f"{word}>", "answer": word[::-1]} for word in words]


def share_right(completion: str, answer: str) -> float:
    """Share of letters in their place; letters too many count as wrong ones."""
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))


def prepare(directory: Path, workload: Workload, *, seed: int) -> None:
    """The model both sides start from, taught the form of an answer, and their tasks."""
    import torch

    from headrace import api, build
    from headrace.data.char_tokenizer import make_char_tokenizer
    from headrace.models.loading import make_tiny_model

    build.quieten()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        raw = directory / "raw"
        vocab_size = make_char_tokenizer(raw, LETTERS + ">")
        make_tiny_model(
            raw, vocab_size=vocab_size, hidden_size=64, num_layers=2, context_tokens=256, seed=seed
        )
        api.warm_start(
            model=raw,
            examples=tasks(NUM_TASKS, workload, seed=seed + 1_000_000),
            output=directory / "model",
            steps=SUPERVISED_STEPS,
            learning_rate=3e-3,
            seed=seed,
        )
    finally:
        torch.set_num_threads(threads)
    (directory / "tasks.json").write_text(json.dumps(tasks(NUM_TASKS, workload, seed=seed)), encoding="utf-8")


def _run_case(case: Case, directory: Path, workload: str, *, steps: int, seed: int) -> Record:
    """One run in a process of its own."""
    out = directory / "record.json"
    out.unlink(missing_ok=True)
    threads = str(case.trl_threads or 1)
    command = [
        sys.executable, "-m", "headrace.bench.against_trl", case.side, str(directory), str(out),
        "--steps", str(WARM_UP_STEPS + steps + COOL_DOWN_STEPS), "--seed", str(seed),
        "--threads", threads, "--max-lag", str(case.max_lag or 0),
        "--max-tokens", str(WORKLOADS[workload].max_tokens),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
    }
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=RUN_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"waited {RUN_DEADLINE_S:g} s for the run of {case.name}; free the machine's cores and run it again"
        ) from None
    if done.returncode != 0:
        raise HeadraceError(f"the run of {case.name} failed:\n{done.stderr.strip()[-2000:]}")
    return Record(**json.loads(out.read_text(encoding="utf-8")))


def _headrace(directory: Path, *, steps: int, seed: int, max_tokens: int, max_lag: int) -> Record:
    from headrace import api
    from headrace.observe.jsonl import read_events

    def reward(completions: list[str], answer: list[str]) -> list[float]:
        return [share_right(text, right) for text, right in zip(completions, answer, strict=True)]

    settings = {
        "run.dir": str(directory / "runs"),
        "run.name": f"{time.time_ns()}",
        "run.seed": seed,
        "run.steps": steps,
        "run.launcher": "local",
        "run.checkpoint_every": 0,
        "run.console": "off",
        "tasks.shuffle": False,
        "rollout.group_size": GROUP_SIZE,
        "rollout.groups_per_step": GROUPS_PER_STEP,
        "rollout.max_tokens": max_tokens,
        "rollout.max_lag": max_lag,
        "engine.max_running": SAMPLES_PER_STEP,
        "algo.clip_low": CLIP,
        "algo.clip_high": CLIP,
        "trainer.learning_rate": LEARNING_RATE,
    }
    rows = json.loads((directory / "tasks.json").read_text(encoding="utf-8"))
    result = api.train(model=directory / "model", tasks=rows, reward=reward, settings=settings)
    events = read_events(result.run_dir / "events.jsonl")
    done = sorted((e for e in events if e["event"] == "step"), key=lambda event: event["step"])
    return Record(
        times=[event["time"] for event in done],
        num_samples=[event["samples"] for event in done],
        num_tokens=[event["tokens"] for event in done],
        rewards=[event["reward"] for event in done],
    )


def _trl(directory: Path, *, steps: int, seed: int, max_tokens: int, threads: int) -> Record:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    record = Record(times=[], num_samples=[], num_tokens=[], rewards=[])

    def reward(completions: list[str], completion_ids: list[Any], answer: list[str], **_: Any) -> list[float]:
        rewards = [share_right(text, right) for text, right in zip(completions, answer, strict=True)]
        record.num_samples.append(len(completions))
        record.num_tokens.append(sum(map(len, completion_ids)))
        record.rewards.append(statistics.fmean(rewards))
        return rewards

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            record.times.append(time.time())

    rows = json.loads((directory / "tasks.json").read_text(encoding="utf-8"))
    trainer = GRPOTrainer(
        model=str(directory / "model"),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(directory / "trl"),
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=SAMPLES_PER_STEP,
            gradient_accumulation_steps=1,
            num_generations=GROUP_SIZE,
            shuffle_dataset=False,
            max_completion_length=max_tokens,
            temperature=1.0,
            num_iterations=1,
            beta=0.0,
            loss_type="dapo",
            scale_rewards="group",
            epsilon=CLIP,
            epsilon_high=CLIP,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            weight_decay=0.0,
            optim="adamw_torch_fused",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    return record


def main() -> None:
    """One run of one side, for ``run``: notes every step and writes what it noted to a file."""
    parser = argparse.ArgumentParser(description="one run of one side; `headrace bench trl` runs them all")
    parser.add_argument("side", choices=("headrace", "trl"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    for name in ("steps", "seed", "threads", "max-lag", "max-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores())
    shared = {"steps": given.steps, "seed": given.seed, "max_tokens": given.max_tokens}
    if given.side == "trl":
        record = _trl(given.directory, **shared, threads=given.threads)
    else:
        record = _headrace(given.directory, **shared, max_lag=given.max_lag)
    given.out.write_text(json.dumps(asdict(record)), encoding="utf-8")


if __name__ == "__main__":
    main()
