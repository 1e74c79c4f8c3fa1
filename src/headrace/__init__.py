"""Headrace trains language models with reinforcement learning and keeps every GPU fed with tokens.

    import headrace

    headrace.train(model="path/to/model", tasks=[("2+2=", "4")], reward=my_reward)

Names are imported when they are first used: the control plane must start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.api import RunResult, evaluate, train, warm_start
    from headrace.config import Settings
    from headrace.errors import HeadraceError

__version__ = "0.1.0"

__all__ = ["HeadraceError", "RunResult", "Settings", "evaluate", "train", "warm_start"]

_HOMES = {
    "HeadraceError": "headrace.errors",
    "RunResult": "headrace.api",
    "Settings": "headrace.config",
    "evaluate": "headrace.api",
    "train": "headrace.api",
    "warm_start": "headrace.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return vars(importlib.import_module(_HOMES[name]))[name]
