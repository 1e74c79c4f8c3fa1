"""The staleness sweep as one SVG picture: reward against lag, a line a composition, a bar from worst to best seed. The
legend is in the order of the lines at their right end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1090, 460, 48, 400, 28, 40
COLOURS = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
)  # fmt: skip
DASHES = ("none", "6 3", "2 3")


def write(found: Mapping[str, Any], path: Path) -> None:
    lags, rewards = found["lags"], found["rewards"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="16">reward over the last tenth of the samples: mean of {len(found["seeds"])} seeds, '
        "bars from worst to best</text>",
    ]
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(tick)}" y2="{_y(tick)}" stroke="#ddd"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{_y(tick) + 4}" text-anchor="end">{tick:.1f}</text>')
    for place, lag in enumerate(lags):
        x = _x(place, len(lags), 0.0)
        parts.append(f'<text x="{x}" y="{HEIGHT - 16}" text-anchor="middle">lag {lag}</text>')
    best_first = sorted(rewards.items(), key=lambda item: -statistics.fmean(item[1][lags[-1]]))
    for number, (name, by_lag) in enumerate(best_first):
        parts += _line(number, len(rewards), name, [by_lag[lag] for lag in lags])
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _line(number: int, count: int, name: str, values: list[list[float]]) -> list[str]:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
    # Beside each other, so that the bars of one lag can be told apart.
    shift = (number - (count - 1) / 2) * min(5.0, 60.0 / count)
    points = [(_x(i, len(values), shift), _y(statistics.fmean(v)), v) for i, v in enumerate(values)]
    path = " ".join(f"{x},{y}" for x, y, _ in points)
    style = f'stroke="{colour}" stroke-dasharray="{dash}"'
    drawn = [f'<polyline points="{path}" fill="none" {style} stroke-width="1.5"/>']
    for x, y, found in points:
        drawn.append(
            f'<line x1="{x}" x2="{x}" y1="{_y(min(found))}" y2="{_y(max(found))}" stroke="{colour}" '
            'stroke-opacity="0.45"/>'
        )
        drawn.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>')
    y = TOP + 16 * (number + 1)
    left = WIDTH - RIGHT + 12
    drawn.append(f'<line x1="{left}" x2="{left + 20}" y1="{y - 4}" y2="{y - 4}" {style} stroke-width="2"/>')
    drawn.append(f'<text x="{left + 26}" y="{y}" fill="{colour}">{name}</text>')
    return drawn


def _x(place: int, count: int, shift: float) -> float:
    inner = WIDTH - RIGHT - LEFT - 80
    return round(LEFT + 40 + place / max(count - 1, 1) * inner + shift, 1)


def _y(reward: float) -> float:
    return round(HEIGHT - BOTTOM - reward * (HEIGHT - BOTTOM - TOP - 8), 1)
