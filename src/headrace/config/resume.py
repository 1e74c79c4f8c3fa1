"""Which settings a resumed run must share with the run it continues.

A setting may change if the recorded attempts, the optimizer state and the task cursor mean the same
under the new value: how long the run goes on, deadlines, checkpoints, and where and on how much
hardware it runs. Everything else is part of the run's identity.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from headrace.config.names import FIELDS
from headrace.config.settings import Settings

MAY_CHANGE = frozenset(
    {
        "run.dir",
        "run.name",
        "run.steps",
        "run.launcher",
        "run.checkpoint_every",
        "run.keep_checkpoints",
        "run.console",
        "run.stall_s",
        "model.device",
        "rollout.attempt_s",
        "reward.timeout_s",
        "reward.error_budget",
        "reward.workers",
        "algo.guard",
        "trainer.on_nonfinite",
        "trainer.ranks",
        "trainer.expert_ranks",
        "trainer.offload",
        "engine.count",
        "engine.max_running",
        "engine.kv_tokens",
        "engine.memory_share",
        "model.eager",
        "weights.mode",
        "weights.transport",
        "weights.bundle",
    }
)
"""Settings a resumed run may have changed."""


def fingerprint(settings: Settings) -> str:
    """Equal exactly when one run's checkpoint can be resumed under the other's settings."""
    return hashlib.sha256(json.dumps(_identity(settings), sort_keys=True).encode()).hexdigest()


def changed_fields(before: Settings, after: Settings) -> dict[str, tuple[str, str]]:
    """By dotted name what differs and must not, in words, before and after; empty when ``after`` may resume
    ``before``."""
    old, new = _identity(before), _identity(after)
    return {name: (_in_words(old[name]), _in_words(new[name])) for name in old if old[name] != new[name]}


def _in_words(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


def _identity(settings: Settings) -> dict[str, Any]:
    values = settings.model_dump()
    pairs = (name.split(".") for name in FIELDS if name not in MAY_CHANGE)
    return {f"{section}.{name}": values[section][name] for section, name in pairs}
