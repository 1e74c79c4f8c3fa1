"""What staleness costs and which composition of loss and corrections bears it best: the demo's task, swept.

In: lags, compositions (a loss and its corrections joined by ``+``, parameters after ``@``, such as
``cispo+tis@tis.cap=3``), seeds and a budget of steps and samples. Out: the reward over the last tenth of each run, as
tables and one picture with the spread. All cells train on equally many samples; cells of one seed have the same model,
tasks and noise, so they are compared in pairs. The inline launcher keeps the queue full, so tokens really are about as
old as the lag allows. Every finished cell is written to a file of its own at once: a later call goes on where an
earlier one ended, and processes with other seeds may fill the same folder.

At lag 0 every loss is the plain policy gradient (tested), so that cell is run once a seed and counts for all.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace import demo
from headrace.algos.composition import ratio_plan
from headrace.bench.lag import final_reward
from headrace.errors import ConfigError

LAGS = (0, 1, 2, 4, 8, 16)
COMPOSITIONS = (
    "ppo", "ppo+tis", "ppo+icepop", "ppo+mis", "ppo+opsm@opsm.delta=0.1", "ppo+k3-filter@k3-filter.limit=0.3", "gspo",
    "gmpo", "cispo", "sapo", "aspo", "decoupled", "decoupled@decoupled.prox=interpolated", "aipo", "aipo+m2po",
    "dppo-tv", "vespo", "dro",
)  # fmt: skip
"""Two filters have bounds wide enough for lagging data; everything else is as by default."""
ON_POLICY = "all"
"""What the cells of lag 0 are filed under."""
RECIPE = (
    *("run.console=off", "run.launcher=inline", "run.checkpoint_every=0"),
    *("trainer.schedule=constant", "rollout.group_size=16"),
)
WARM_STEPS = 60


@dataclass(frozen=True, slots=True)
class Budget:
    """What every cell may spend."""

    steps: int = 120
    groups: int = 8
    """Groups of 16 attempts in a step."""
    learning_rate: float = 8e-4


def overrides(composition: str, lag: int, budget: Budget) -> list[str]:
    """The settings of one cell."""
    names, *parameters = ("ppo" if composition == ON_POLICY else composition).split("@")
    loss, *corrections = names.split("+")
    ratio_plan(loss, corrections)
    return [
        *RECIPE,
        f"run.steps={budget.steps}",
        f"rollout.groups_per_step={budget.groups}",
        f"trainer.learning_rate={budget.learning_rate}",
        f"rollout.max_lag={lag}",
        f"algo.loss={loss}",
        f"algo.corrections={json.dumps(corrections)}",
        *(f"algo.options.{parameter}" for parameter in parameters),
    ]


def sweep(
    folder: Path,
    *,
    seeds: Sequence[int],
    lags: Sequence[int] = LAGS,
    compositions: Sequence[str] = COMPOSITIONS,
    budget: Budget | None = None,
    on_run: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Every cell that ``folder`` does not hold yet, seed by seed; then the figures of all of these."""
    budget = budget or Budget()
    for composition in compositions:
        overrides(composition, max(lags), budget)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(s, lag, c) for s in seeds for lag in lags for c in ([ON_POLICY] if lag == 0 else compositions)]
    missing = [cell for cell in wanted if _read(folder, budget, *cell) is None]
    for number, (seed, lag, composition) in enumerate(missing, 1):
        begun = time.monotonic()
        rewards = _run(overrides(composition, lag, budget), seed)
        cell = {
            "seed": seed,
            "lag": lag,
            "composition": composition,
            "budget": asdict(budget),
            "final": final_reward(rewards),
            "seconds": round(time.monotonic() - begun, 1),
            "rewards": [round(reward, 5) for reward in rewards],
        }
        _write(_path(folder, seed, lag, composition), cell)
        on_run(
            f"{number} of {len(missing)}: seed {seed}, lag {lag}, {composition}: {rewards[0]:.3f} -> "
            f"{cell['final']:.3f} in {cell['seconds']:.0f} s"
        )
    cells = [_read(folder, budget, *cell) for cell in wanted]
    return figures([cell for cell in cells if cell is not None], lags=lags, compositions=compositions)


def _run(settings: Sequence[str], seed: int) -> tuple[float, ...]:
    with tempfile.TemporaryDirectory(prefix="headrace-sweep-") as directory:
        result = demo.run(seed=seed, overrides=[*settings, f"run.dir={directory}"], warm_steps=WARM_STEPS)
    if result.interrupted:
        raise KeyboardInterrupt
    return result.rewards


def _path(folder: Path, seed: int, lag: int, composition: str) -> Path:
    return folder / f"seed-{seed}-lag-{lag}-{composition}.json"


def _read(folder: Path, budget: Budget, seed: int, lag: int, composition: str) -> dict[str, Any] | None:
    """A finished cell, or None."""
    path = _path(folder, seed, lag, composition)
    if not path.exists():
        return None
    cell: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if cell["budget"] != asdict(budget):
        raise ConfigError(
            f"{path} is of another budget ({cell['budget']}): go on with that budget, or name another folder"
        )
    return cell


def _write(path: Path, cell: Mapping[str, Any]) -> None:
    """Whole or not at all, so that an interrupted sweep can always go on."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(cell), encoding="utf-8")
    partial.replace(path)


def figures(
    cells: Sequence[Mapping[str, Any]], *, lags: Sequence[int], compositions: Sequence[str]
) -> dict[str, Any]:
    """Final rewards by composition and lag, in the order of the seeds; and paired differences from the first lag and
    from the first composition at the same lag."""
    finals = {(cell["seed"], cell["lag"], cell["composition"]): float(cell["final"]) for cell in cells}
    seeds = sorted({cell["seed"] for cell in cells})
    rewards = {
        c: {lag: [finals[seed, lag, ON_POLICY if lag == 0 else c] for seed in seeds] for lag in lags}
        for c in compositions
    }
    base = rewards[compositions[0]]
    return {
        "seeds": seeds,
        "lags": list(lags),
        "rewards": rewards,
        "against_first": {c: {lag: _paired(by[lag], base[lag]) for lag in lags} for c, by in rewards.items()},
        "against_first_lag": {
            c: {lag: _paired(by[lag], by[lags[0]]) for lag in lags} for c, by in rewards.items()
        },
        "cell_seconds": statistics.fmean(float(cell["seconds"]) for cell in cells),
    }


def _paired(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def table(found: Mapping[str, Any]) -> Table:
    """Mean and deviation over the seeds; below it the paired difference from the first composition and its standard
    error."""
    drawn = Table(
        title=f"reward over the last tenth, {len(found['seeds'])} seeds; below: paired difference from the first row",
        title_justify="left", box=None, padding=(0, 2, 0, 0),
    )  # fmt: skip
    drawn.add_column("composition")
    for lag in found["lags"]:
        drawn.add_column(f"lag {lag}", justify="right")
    for name, by_lag in found["rewards"].items():
        differences = found["against_first"][name]
        drawn.add_row(name, *(_with_spread(by_lag[lag]) for lag in found["lags"]))
        drawn.add_row("", *(_difference(differences[lag]) for lag in found["lags"]), style="dim")
    return drawn


def _with_spread(values: Sequence[float]) -> str:
    spread = f" +-{statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def _difference(values: Sequence[float]) -> str:
    error = f" ({statistics.stdev(values) / len(values) ** 0.5:.3f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.3f}{error}"
