"""What an engine process holds: its weights, keys and values, and the memory of its largest passes.

In: a model's sizes and what the engine is asked to hold. Out: bytes by purpose, and how many tokens of keys and
values that is. Where the number is not given, it is found as the engine finds it, with the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.engines.device_setup import beside_kv_bytes, most_blocks
from headrace.engines.device_state import block_bytes
from headrace.engines.plain_executor import RESIDENT_BYTES, usual_kv_tokens
from headrace.memory.architecture import Architecture
from headrace.memory.uses import Purpose

Bytes = dict[Purpose, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    dtype: torch.dtype
    on_gpu: bool
    max_running: int
    prefill_tokens: int
    block_size: int
    kv_tokens: int | None
    """None: what the engine would find."""
    memory_share: float
    scored_tokens: int = 0
    """Tokens whose logits are held whole, where given sequences are scored."""


@dataclass(frozen=True, slots=True)
class EngineBytes:
    device: Bytes
    kv_tokens: int


def engine_bytes(model: Architecture, plan: EnginePlan, *, device_bytes: int) -> EngineBytes:
    # A run serves the one adapter it trains.
    weights = (model.num_weights + model.num_adapter_weights) * plan.dtype.itemsize
    one_pass = round(plan.prefill_tokens * model.pass_bytes)
    # Scores are computed from logits with two results on the way.
    logit_rows = max(2, plan.max_running) + 3 * plan.scored_tokens
    logits = logit_rows * model.vocab_size * torch.float32.itemsize
    per_block = block_bytes(model.attention, plan.block_size, plan.dtype)
    if plan.on_gpu:
        room = int(device_bytes * plan.memory_share) - weights - logits - beside_kv_bytes(one_pass)
        enough = most_blocks(model.context_tokens, plan.max_running, plan.block_size)
        num_blocks = max(min(enough, room // per_block), 2)
        passes = 2 * one_pass + logits
    else:
        num_blocks = _blocks(usual_kv_tokens(model.context_tokens, plan.max_running), plan.block_size)
        # Logits, and two results on the way from them to a draw.
        passes = one_pass + 3 * logits
    if plan.kv_tokens is not None:
        num_blocks = _blocks(plan.kv_tokens, plan.block_size)
    kv = num_blocks * per_block
    if not plan.on_gpu:
        passes += min(RESIDENT_BYTES, kv)
    return EngineBytes(
        {"weights, computed with": weights, "keys and values": kv, "passes": passes},
        (num_blocks - 1) * plan.block_size,
    )


def _blocks(kv_tokens: int, block_size: int) -> int:
    """One more than the tokens fill is nobody's."""
    return -(-kv_tokens // block_size) + 1
