"""Small whole runs in one process: their settings, a reward that moves the weights, and the call itself."""

from __future__ import annotations

from typing import Any

import headrace
from headrace import demo

SMALL: dict[str, Any] = {
    "run.launcher": "inline",
    "run.console": "off",
    "run.checkpoint_every": 2,
    "run.name": "run",
    "rollout.group_size": 4,
    "rollout.groups_per_step": 2,
}


def letters(completions: list[str]) -> list[float]:
    """Never the same for all attempts, so that every step moves the weights."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def train(settings: dict[str, Any], **more: Any) -> Any:
    return headrace.train(tasks=demo.tasks(64), reward=letters, settings=settings, **more)
