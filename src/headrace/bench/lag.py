"""Does staleness cost reward? The demo's task at two lags, several seeds, paired.

In: lags and seeds. Out: every learning curve, the mean reward over the last tenth of the samples, and the
difference of the two lags seed by seed; the curves also as an SVG picture. Same model, tasks and seeds
on both sides, so a pair differs in nothing but ``max_lag``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace import demo

LAGS = (0, 4)
RECIPE = ("run.console=off",)
WARM_STEPS = 30
WIDTH, HEIGHT, MARGIN = 640, 360, 44
COLOURS = ("#1f77b4", "#d62728")


def run(*, seeds: Sequence[int], on_run: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    curves: dict[int, list[tuple[float, ...]]] = {lag: [] for lag in LAGS}
    for seed in seeds:
        for lag in LAGS:
            overrides = [*RECIPE, f"rollout.max_lag={lag}", f"run.name=lag-{lag}-seed-{seed}"]
            result = demo.run(seed=seed, overrides=overrides, warm_steps=WARM_STEPS)
            if result.interrupted:
                raise KeyboardInterrupt
            rewards = result.rewards
            curves[lag].append(rewards)
            on_run(f"seed {seed}, max_lag {lag}: {rewards[0]:.3f} -> {final_reward(rewards):.3f}")
    finals = {lag: [final_reward(rewards) for rewards in runs] for lag, runs in curves.items()}
    pairs = [late - early for early, late in zip(*finals.values(), strict=True)]
    return {
        "seeds": list(seeds),
        "first": {lag: [statistics.fmean(r[:10]) for r in runs] for lag, runs in curves.items()},
        "final": finals,
        "differences": pairs,
        "mean_difference": statistics.fmean(pairs),
        "curves": curves,
    }


def final_reward(rewards: Sequence[float]) -> float:
    """Mean over the last tenth; every step has the same number of samples."""
    return statistics.fmean(rewards[-max(1, len(rewards) // 10) :])


def table(figures: dict[str, Any]) -> Table:
    drawn = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("seed", "first 10 steps", *(f"max_lag {lag}" for lag in LAGS), "difference"):
        drawn.add_column(name, justify="right")
    for i, seed in enumerate(figures["seeds"]):
        finals = (figures["final"][lag][i] for lag in LAGS)
        first = figures["first"][LAGS[0]][i]
        row = (str(seed), f"{first:.3f}", *(f"{x:.3f}" for x in finals), f"{figures['differences'][i]:+.3f}")
        drawn.add_row(*row)
    means = (statistics.fmean(figures["final"][lag]) for lag in LAGS)
    drawn.add_row(
        "mean", "", *(f"{x:.3f}" for x in means), f"{figures['mean_difference']:+.3f}", style="bold"
    )
    return drawn


def write_picture(figures: dict[str, Any], path: Path) -> None:
    """All curves, smoothed over ten steps, one colour a lag."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    longest = max(len(rewards) for runs in figures["curves"].values() for rewards in runs)
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        y = _y(tick)
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - 10}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{y + 4}" text-anchor="end">{tick:.1f}</text>')
    for colour, (lag, runs) in zip(COLOURS, figures["curves"].items(), strict=True):
        for rewards in runs:
            points = " ".join(f"{_x(i, longest)},{_y(value)}" for i, value in enumerate(_smooth(rewards)))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        y = HEIGHT - MARGIN - 12 - 16 * LAGS.index(lag)
        parts.append(f'<text x="{WIDTH - 110}" y="{y}" fill="{colour}">max_lag {lag}</text>')
    parts.append(f'<text x="{MARGIN}" y="{HEIGHT - 12}">step 1</text>')
    parts.append(f'<text x="{WIDTH - 10}" y="{HEIGHT - 12}" text-anchor="end">step {longest}</text>')
    parts.append(f'<text x="{MARGIN}" y="16">mean reward of a step (mean of ten)</text></svg>')
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _x(step: int, longest: int) -> float:
    return round(MARGIN + step / max(longest - 1, 1) * (WIDTH - 10 - MARGIN), 1)


def _y(reward: float) -> float:
    return round(HEIGHT - MARGIN - reward * (HEIGHT - MARGIN - 24), 1)


def _smooth(values: Sequence[float], window: int = 10) -> list[float]:
    return [statistics.fmean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]
