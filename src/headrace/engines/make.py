"""Puts an engine together: the executor that fits the model's device, and the engine around it."""

from __future__ import annotations

from transformers import PreTrainedModel

from headrace.engines.executor import Executor
from headrace.engines.torch_engine import TorchEngine
from headrace.timekeeping import TimeLedger


def torch_engine(
    model: PreTrainedModel,
    *,
    ledger: TimeLedger,
    version: int = 0,
    max_running: int = 64,
    block_size: int = 16,
    kv_tokens: int | None = None,
    prefill_tokens: int = 512,
    recompute_kv: bool = False,
) -> TorchEngine:
    """``kv_tokens``: rows of key-value memory; None derives them from the model and the memory there is."""
    assert block_size & (block_size - 1) == 0, "block_size must be a power of two"
    executor = _executor(
        model,
        max_running=max_running,
        block_size=block_size,
        kv_tokens=kv_tokens,
        prefill_tokens=prefill_tokens,
    )
    return TorchEngine(
        executor, ledger=ledger, version=version, prefill_tokens=prefill_tokens, recompute_kv=recompute_kv
    )


def _executor(
    model: PreTrainedModel, *, max_running: int, block_size: int, kv_tokens: int | None, prefill_tokens: int
) -> Executor:
    from headrace.engines.plain_executor import PlainExecutor

    return PlainExecutor(
        model,
        max_running=max_running,
        block_size=block_size,
        kv_tokens=kv_tokens,
        prefill_tokens=prefill_tokens,
    )
