"""Puts an engine together: the executor that fits the model's device, and the engine around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from headrace.engines.executor import Executor
from headrace.engines.torch_engine import TorchEngine
from headrace.models.float_residual import keep_float_residual
from headrace.models.lora import LoraSpec
from headrace.timekeeping import TimeLedger
from headrace.types import BLOCK_TOKENS

_USUAL_RUNNING = {"cpu": 64, "cuda": 512}
_USUAL_PREFILL = {"cpu": 512, "cuda": 8192}


def torch_engine(
    model: PreTrainedModel,
    *,
    ledger: TimeLedger,
    version: int = 0,
    max_running: int | None = None,
    block_size: int = BLOCK_TOKENS,
    kv_tokens: int | None = None,
    prefill_tokens: int | None = None,
    recompute_kv: bool = False,
    compiled: bool = True,
    memory_share: float = 0.9,
    lora: LoraSpec | None = None,
    num_adapters: int = 1,
    record_routes: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> TorchEngine:
    """``kv_tokens``, ``max_running``, ``prefill_tokens``: None derives them from the model and the device.
    ``compiled`` and ``memory_share`` (of the device's memory, weights included) matter on a GPU only.
    ``lora``: make room for ``num_adapters`` adapters of at most that rank in those layers; the model's own weights
    then stay as they are. ``record_routes``: completions of models that route carry the experts of every token."""
    assert block_size & (block_size - 1) == 0, "block_size must be a power of two"
    keep_float_residual(model)
    kind = model.device.type
    max_running, prefill_tokens = usual_sizes(kind, max_running, prefill_tokens)
    sizes: dict[str, Any] = {
        "max_running": max_running,
        "block_size": block_size,
        "prefill_tokens": prefill_tokens,
        "lora": lora,
        "num_adapters": num_adapters,
        "record_routes": record_routes,
    }
    executor: Executor
    if kind == "cuda":
        from headrace.engines.device_executor import DeviceExecutor

        executor = DeviceExecutor(
            model,
            **sizes,
            kv_tokens=kv_tokens,
            compiled=compiled,
            memory_share=memory_share,
            progress=progress,
        )
    else:
        from headrace.engines.plain_executor import PlainExecutor

        executor = PlainExecutor(model, **sizes, kv_tokens=kv_tokens)
    return TorchEngine(
        executor, ledger=ledger, version=version, prefill_tokens=prefill_tokens, recompute_kv=recompute_kv
    )


def usual_sizes(kind: str, max_running: int | None, prefill_tokens: int | None) -> tuple[int, int]:
    """Requests at a time and prompt tokens of a pass, as asked for or as usual on this kind of device."""
    return (
        max_running or _USUAL_RUNNING.get(kind, _USUAL_RUNNING["cpu"]),
        prefill_tokens or _USUAL_PREFILL.get(kind, _USUAL_PREFILL["cpu"]),
    )
