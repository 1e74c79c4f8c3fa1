"""Typed, validated settings: TOML files, dotted overrides, and errors that say what to do.

``settings`` holds the fields, ``parameters`` what is named in their tables, ``checks`` the impossible combinations,
``loading`` the ways in, ``toml`` the way out, ``resume`` what a resumed run must share; ``names``, ``moved`` and
``reference`` serve errors and docs.
"""

from headrace.config.loading import from_dict, laid_over, load, require
from headrace.config.resume import changed_fields, fingerprint
from headrace.config.settings import (
    AlgoSettings,
    EngineSettings,
    ModelSettings,
    RewardSettings,
    RolloutSettings,
    RunSettings,
    Settings,
    TaskSettings,
    TrainerSettings,
    WeightSettings,
)
from headrace.config.toml import to_toml

__all__ = [
    "AlgoSettings",
    "EngineSettings",
    "ModelSettings",
    "RewardSettings",
    "RolloutSettings",
    "RunSettings",
    "Settings",
    "TaskSettings",
    "TrainerSettings",
    "WeightSettings",
    "changed_fields",
    "fingerprint",
    "from_dict",
    "laid_over",
    "load",
    "require",
    "to_toml",
]
