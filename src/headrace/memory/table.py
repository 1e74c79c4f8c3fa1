"""A memory plan as people read it: purposes down, processes across, totals and a verdict below."""

from __future__ import annotations

import re
from typing import get_args

from rich.table import Table

from headrace.memory.plan import HOST, MemoryPlan
from headrace.memory.uses import Purpose, total


def table(plan: MemoryPlan) -> Table:
    """Processes that hold the same in the same kind of place share a column."""
    columns = _columns(plan)
    drawn = Table(box=None, padding=(0, 2, 0, 0))
    drawn.add_column("GB (10^9 bytes)")
    for heading, _ in columns:
        drawn.add_column(heading, justify="right")
    for purpose in get_args(Purpose):
        row = [bytes_of.get(purpose, 0) for _, bytes_of in columns]
        if any(row):
            drawn.add_row(purpose, *(gigabytes(value) if value else "" for value in row))
    drawn.add_row("total", *(gigabytes(sum(bytes_of.values())) for _, bytes_of in columns), style="bold")
    return drawn


def _columns(plan: MemoryPlan) -> list[tuple[str, dict[Purpose, int]]]:
    alike: list[tuple[list[str], list[str], dict[Purpose, int]]] = []
    for process in plan.processes:
        for place in plan.places:
            bytes_of: dict[Purpose, int] = {}
            for use in plan.uses:
                if (use.process, use.place) == (process, place):
                    bytes_of[use.purpose] = bytes_of.get(use.purpose, 0) + use.num_bytes
            if not bytes_of:
                continue
            last = alike[-1] if alike else None
            if last is not None and last[2] == bytes_of and (last[1][-1] == HOST) == (place == HOST):
                last[0].append(process)
                last[1].append(place)
            else:
                alike.append(([process], [place], bytes_of))
    return [(f"{_span(names)}\n{_span(places)}", bytes_of) for names, places, bytes_of in alike]


def _span(names: list[str]) -> str:
    """Numbered ones from the first to the last, others one by one."""
    different = list(dict.fromkeys(names))
    numbered = [re.fullmatch(r"(.*[- ])(\d+)", name) for name in different]
    kinds = {None if found is None else found[1] for found in numbered}
    if len(different) == 1 or len(kinds) > 1 or numbered[-1] is None:
        return ", ".join(different)
    return f"{different[0]} to {numbered[-1][2]}"


def lines(plan: MemoryPlan, found: list[str], longest: int, context_tokens: int) -> list[str]:
    """What was assumed, what each device needs, and what to change."""
    recomputed = f", {plan.layers_recomputed} of {plan.num_layers} layers recomputed" if plan.on_gpu else ""
    said = [
        f"{plan.model}, {plan.num_weights / 1e9:.2f} billion weights",
        f"rows of {plan.row_tokens:,} tokens{recomputed}; each engine keeps {plan.kv_tokens:,} tokens",
        *_needs_of_all(plan),
        f"longest sequence that can be trained: {longest:,} of the model's {context_tokens:,} tokens",
    ]
    if not plan.crowded:
        return [*said, "it fits"]
    short = f"{', '.join(plan.crowded)} {'is' if len(plan.crowded) == 1 else 'are'} too small"
    if found:
        return [
            *said,
            f"{short}; any one of these makes it fit: {', '.join(f'--set {one}' for one in found)}",
        ]
    return [*said, f"{short}, and no single setting helps; use more or larger devices, or a smaller model"]


def _needs_of_all(plan: MemoryPlan) -> list[str]:
    """A line for each place, or for those in a row that need the same."""
    alike: list[tuple[list[str], str]] = []
    for place in plan.places:
        needed = _needs(plan, place)
        if alike and alike[-1][1] == needed:
            alike[-1][0].append(place)
        else:
            alike.append(([place], needed))
    return [f"{_span(places)}: {needed}{' each' if len(places) > 1 else ''}" for places, needed in alike]


def _needs(plan: MemoryPlan, place: str) -> str:
    needed = total(plan.uses, place=place)
    if place == HOST and plan.on_gpu:
        return f"{gigabytes(needed)} GB beside what the processes themselves take"
    return f"{gigabytes(needed)} of {gigabytes(plan.device_bytes)} GB ({needed / plan.device_bytes:.0%})"


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f}"
