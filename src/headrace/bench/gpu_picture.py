"""What was measured beside peers on one GPU, as one SVG picture: seconds as bars, and the least that they could be
(of a step: where generating and training take turns).

In: figures of ``headrace bench engine --against vllm`` and ``bench step --against trl``, as ``bench aims`` reads them.
Out: for each workload a bar for every side, all on one scale, with a line across where the hardware's limit lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import ConfigError

WIDTH, LEFT, RIGHT, TOP = 860, 250, 150, 14
BAR, STEP, TITLE, GAP = 16, 21, 22, 14
OURS, PEERS, LIMIT = "#1f77b4", "#9a9a9a", "#d62728"
_SIDES = {0: "Headrace, taking turns", 1: "Headrace, at the same time"}
_SHAPES = ("qwen2-0.5b", "qwen2-1.5b", "qwen2-7b")


class Bar(NamedTuple):
    side: str
    seconds: float
    is_ours: bool


class Group(NamedTuple):
    title: str
    limit_s: float
    bars: list[Bar]
    limit: str = "limit"


def write(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Raises ConfigError where no figures are of a workload with a peer."""
    groups = [*_rollouts(found), *_steps(found)]
    if not groups:
        raise ConfigError(
            "--picture: no file has figures beside a peer; name some of bench engine --shape --against vllm, or of "
            "bench step --against trl"
        )
    path.write_text(draw(groups), encoding="utf-8")


def draw(groups: Sequence[Group]) -> str:
    longest = max(bar.seconds for group in groups for bar in group.bars)
    height = TOP + sum(TITLE + STEP * len(group.bars) + GAP for group in groups)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    y = TOP
    for group in groups:
        parts += _drawn(group, y, (WIDTH - LEFT - RIGHT) / longest)
        y += TITLE + STEP * len(group.bars) + GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(group: Group, top: int, width_of_second: float) -> Iterator[str]:
    yield f'<text x="12" y="{top + 13}" font-weight="bold">{group.title}</text>'
    peer_s = min((bar.seconds for bar in group.bars if not bar.is_ours), default=0.0)
    for number, (side, seconds, is_ours) in enumerate(group.bars):
        y = top + TITLE + STEP * number
        end = round(LEFT + seconds * width_of_second, 1)
        yield f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end">{side}</text>'
        yield (
            f'<rect x="{LEFT}" y="{y}" width="{round(end - LEFT, 1)}" height="{BAR}" '
            f'fill="{OURS if is_ours else PEERS}"/>'
        )
        quicker = f", {_in_digits(peer_s / seconds)} times as fast" if is_ours and peer_s else ""
        yield f'<text x="{end + 6}" y="{y + 13}">{seconds:.2f} s{quicker}</text>'
    x, bottom = round(LEFT + group.limit_s * width_of_second, 1), top + TITLE + STEP * len(group.bars) - 5
    yield f'<line x1="{x}" x2="{x}" y1="{top + TITLE - 4}" y2="{bottom + 4}" stroke="{LIMIT}" stroke-dasharray="4 2"/>'
    yield (
        f'<text x="{x}" y="{top + TITLE - 7}" fill="{LIMIT}" font-size="11" text-anchor="middle">'
        f"{group.limit} {group.limit_s:.2f} s</text>"
    )


def _in_digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}"


def _rollouts(found: Sequence[Mapping[str, Any]]) -> Iterator[Group]:
    """Of all samples at once, in one turn; of each shape the last."""
    for shape in _SHAPES:
        about = [
            figures
            for figures in found
            if figures["taken"]["bench"] == "engine"
            and "seconds" in figures.get("vllm", {})
            and (shape, 1, 1) == tuple(figures["headrace"][name] for name in ("shape", "rounds", "turns"))
        ]
        if about:
            ours, theirs = (_last(about)[side] for side in ("headrace", "vllm"))
            bars = [Bar("Headrace", ours["seconds"], True), Bar("vLLM", theirs["seconds"], False)]
            yield Group(f"rollouts, {shape}", ours["limit_s"], bars)


def _steps(found: Sequence[Mapping[str, Any]]) -> Iterator[Group]:
    about = [
        figures
        for figures in found
        if figures["taken"]["bench"] == "step" and "seconds" in figures.get("trl", {})
    ]
    if not about:
        return
    figures = _last(about)
    ours = (
        (_SIDES.get(row["max_lag"], f"Headrace, max_lag {row['max_lag']}"), row)
        for row in figures["headrace"]
    )
    theirs = (("TRL with vLLM", row) for row in figures["trl"]["tried"] if "seconds" in row)
    bars = [
        Bar(f"{side}, {row['peak_bytes'] / 1e9:.0f} GB", row["seconds"], side.startswith("Headrace"))
        for side, row in (*ours, *theirs)
    ]
    yield Group(f"a GRPO step, {figures['shape']}", figures["limit_s"], bars, "limit, taking turns,")


def _last(about: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(about, key=lambda figures: figures["taken"]["date"])
