"""Sizes that follow from where a run computes, where its settings leave them open.

In: settings and a kind of device. Out: plain numbers, for those who build a run and those who plan one.
"""

from __future__ import annotations

from headrace.config import EngineSettings, Settings

_ROW_TOKENS = {"cpu": 4096, "cuda": 16384}
_SHARE_ALONE = 0.9
_SHARE_BESIDE_TRAINER = 0.4
_SCORED_TOKENS = 1024
"""Tokens a reference scores in one pass, whose logits are held whole."""


def row_tokens(settings: Settings, place: str) -> int:
    return settings.trainer.row_tokens or _ROW_TOKENS[place]


def memory_share(settings: Settings, *, beside_trainer: bool) -> float:
    """Of a GPU's memory, what an engine may take."""
    return settings.engine.memory_share or (_SHARE_BESIDE_TRAINER if beside_trainer else _SHARE_ALONE)


def reference_settings(settings: Settings, context_tokens: int) -> EngineSettings:
    """Of an engine that only scores, one sequence at a time."""
    asked = settings.engine
    return asked.model_copy(
        update={
            "max_running": 1,
            "kv_tokens": context_tokens,
            "prefill_tokens": min(asked.prefill_tokens or _SCORED_TOKENS, _SCORED_TOKENS),
        }
    )
