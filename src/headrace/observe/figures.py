"""Numbers as people read them in a narrow column: short counts, durations, sparklines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII_BLOCKS = "_.-=+*#@"


def short(number: float) -> str:
    """``12.3k`` for 12345; at most five characters up to a trillion."""
    for limit, divisor, suffix in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "G")):
        if abs(number) < limit * 0.9995 or limit == 1e12:
            scaled = number / divisor
            digits = 0 if abs(scaled) >= 99.95 or (suffix == "" and scaled == int(scaled)) else 1
            return f"{scaled:.{digits}f}{suffix}"
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """``1:02:03``, ``2:03`` or ``4.5 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float], *, width: int = 24, blocks: str = BLOCKS) -> str:
    """The course of ``values`` in at most ``width`` characters; each stands for the mean of its stretch."""
    if not values:
        return ""
    num_points = min(width, len(values))
    edges = [i * len(values) // num_points for i in range(num_points + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    top = len(blocks) - 1
    # A flat line is drawn low: nothing has risen yet.
    return "".join(blocks[round(top * (m - low) / (high - low)) if high > low else 0] for m in means)
