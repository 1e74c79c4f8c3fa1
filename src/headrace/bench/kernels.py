"""``headrace bench kernels``: how close each GPU kernel comes to what the chip can do; or what it is compiled to.

In: which cases, by a part of their name. Out: seconds of a launch and what it reads, or multiplies, a second, beside
the rate of a large copy or product in the same run; where no GPU is wanted, the resources that each kernel takes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from rich.table import Table

from headrace.bench import (
    attention_kernels,
    moving_kernels,
    product_kernels,
    sampling_kernels,
    train_kernels,
)
from headrace.bench.kernel_cases import Case, seconds
from headrace.bench.rates import copy_bandwidth, matmul_flops_per_s
from headrace.errors import ConfigError

_SOURCES = (attention_kernels, product_kernels, sampling_kernels, train_kernels, moving_kernels)


def cases(device: torch.device, only: str = "") -> Iterator[Case]:
    """Those whose name, or whose owner's, has ``only`` in it. Each is made when it is asked for, with its memory."""
    found = (case for source in _SOURCES for case in source.cases(device) if only in f"{case.name} {case.of}")
    first = next(found, None)
    if first is None:
        raise ConfigError(f"--only {only!r}: no kernel's case has that in its name; leave it out to see all")
    yield first
    del first
    yield from found


def run(
    only: str = "", *, device: str = "cuda", progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """On a GPU: every case timed, cold."""
    limits = {"TB/s": copy_bandwidth() * 1e-12, "TFLOP/s": matmul_flops_per_s() * 1e-12}
    timed = []
    for case in cases(torch.device(device), only):
        taken = seconds(case)
        rate = case.amount / taken * 1e-12
        timed.append(
            {
                "case": case.name,
                "of": case.of or "headrace",
                "us": taken * 1e6,
                "rate": rate,
                "unit": case.unit,
                "fraction_of_limit": rate / limits[case.unit],
            }
        )
        progress(f"{case.name}, {timed[-1]['of']}: {taken * 1e6:.1f} us")
        del case
        gc.collect()
        torch.cuda.empty_cache()
    return {"device": torch.cuda.get_device_name(), "limits": limits, "cases": timed}


def run_compiled(only: str = "", *, progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """On any machine: what our kernels are compiled to for an H200. Variants that need the same are told once, under
    the case that the first is used in."""
    import triton

    from headrace.bench.compiling import compiled

    seen, found = set(), []
    for case in cases(torch.device("meta"), only):
        for made in compiled(case.launches[0]) if not case.of else ():
            needed = (made.kernel, made.num_warps, made.shared_bytes, made.resources)
            if needed in seen:
                continue
            seen.add(needed)
            found.append(
                {
                    "case": case.name,
                    "kernel": made.kernel,
                    "num_warps": made.num_warps,
                    "at_once": made.at_once,
                    "shared_bytes": made.shared_bytes,
                    **made.resources._asdict(),
                }
            )
            progress(f"{case.name}: {made.kernel}")
    return {"compiled_for": "H200", "triton": triton.__version__, "kernels": found}


def table(figures: Mapping[str, Any]) -> Table:
    """The figures for people."""
    if "kernels" in figures:
        return _table_of_compiled(figures)
    limits = figures["limits"]
    title = (
        f"{figures['device']}: a large copy {limits['TB/s']:.2f} TB/s, a large product {limits['TFLOP/s']:.0f} "
        "TFLOP/s"
    )
    drawn = _new_table(title, ("case", "of"), ("us", "a second", "of the limit"))
    for case in figures["cases"]:
        drawn.add_row(
            case["case"],
            case["of"],
            f"{case['us']:,.1f}",
            f"{case['rate']:.{2 if case['unit'] == 'TB/s' else 0}f} {case['unit']}",
            f"{case['fraction_of_limit']:.0%}",
        )
    return drawn


def _table_of_compiled(figures: Mapping[str, Any]) -> Table:
    title = f"compiled for an {figures['compiled_for']} by Triton {figures['triton']}, and not run"
    counts = ("warps", "registers", "spilled", "shared memory", "instructions", "programs at once")
    drawn = _new_table(title, ("first used in", "kernel"), counts)
    for kernel in figures["kernels"]:
        drawn.add_row(
            kernel["case"],
            kernel["kernel"],
            str(kernel["num_warps"]),
            str(kernel["registers"]),
            f"{kernel['spilled_bytes']} B",
            f"{kernel['shared_bytes']:,} B",
            f"{kernel['num_instructions']:,}",
            str(kernel["at_once"]),
        )
    return drawn


def _new_table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in words:
        drawn.add_column(name)
    for name in numbers:
        drawn.add_column(name, justify="right")
    return drawn
