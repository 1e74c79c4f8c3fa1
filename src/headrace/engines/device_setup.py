"""Before the first request: does the device path compute this model, and how much room is there for it?

In: a model and the sizes asked for. Out: passes over memory of the right size, once two chunks, one of them also
padded, and two decoding rows over shuffled blocks, one of them with a shared prompt, have agreed with a plain forward
of the same model. Memory that the largest passes do not need goes to keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.engines.checks import (
    check_agreement,
    check_layer_kinds,
    context_tokens,
    plain_logits,
    probe_tokens,
)
from headrace.engines.device_kernels import Kernels, TorchKernels, TritonKernels
from headrace.engines.device_model import DeviceModel, LayerShape
from headrace.engines.device_passes import DevicePasses
from headrace.engines.device_state import DeviceState, block_bytes
from headrace.engines.pieces import Piece, lay_out
from headrace.engines.prompt_batches import PromptBatch
from headrace.engines.sequences import SlotTable, new_sequence
from headrace.engines.shared_prompts import SharedPromptFinder
from headrace.errors import ConfigError
from headrace.kernels.chip import has_kernels
from headrace.kernels.kept_code import keep_compiled
from headrace.models.adapter_bank import AdapterBank
from headrace.models.lora import LoraSpec
from headrace.models.route_recording import RouteRecorder
from headrace.types import Request, Sampling

_PADDING_ROWS = 8
_SPARE_BYTES = 1 << 30
"""Left alone for what the allocator and libraries take besides tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What an engine on a device is asked to hold."""

    max_running: int
    block_size: int
    kv_tokens: int | None
    """Rows of key-value memory; None: what fits."""
    prefill_tokens: int
    memory_share: float
    """Of the device's memory, what the engine may take, the model's weights included."""
    lora: LoraSpec | None = None
    """None: no adapters."""
    num_adapters: int = 1
    record_routes: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    passes: DevicePasses
    num_blocks: int
    limit_tokens: int
    capturable: bool
    bank: AdapterBank | None
    recorder: RouteRecorder | None


def prepare(
    model: PreTrainedModel, limits: DeviceLimits, *, compiled: bool, progress: Callable[[str], None]
) -> Prepared:
    """Passes ready to be captured, or ModelError where the model cannot be computed here."""
    keep_compiled()
    config, size = model.config.get_text_config(), limits.block_size
    check_layer_kinds(config, type(model).__name__)
    probe, context = probe_tokens(config), context_tokens(config)
    expected = plain_logits(model, probe)
    progress("compiling the model's layers" if compiled else "checking the model")
    shaped = DeviceModel(
        model,
        compiled=compiled,
        lora=limits.lora,
        num_adapters=limits.num_adapters,
        routed_rows=max(limits.prefill_tokens, limits.max_running, len(probe)) if limits.record_routes else 0,
    )
    kernels = _kernels(shaped, limits.max_running, context, model.device)

    def passes(num_blocks: int) -> DevicePasses:
        state = DeviceState(
            shaped.layers,
            num_blocks=num_blocks,
            block_size=size,
            num_slots=limits.max_running,
            row_blocks=-(-context // size),
            dtype=model.dtype,
            device=model.device,
        )
        return DevicePasses(shaped, state, kernels, max(2, limits.max_running))

    trial = passes(-(-len(probe) // size) + 1)
    check_agreement(model, check_passes(trial, probe.numpy()), expected)
    if limits.kv_tokens is None:
        enough = most_blocks(context, limits.max_running, size)
        num_blocks = min(enough, _blocks_that_fit(trial, shaped.layers, limits))
    else:
        num_blocks = -(-limits.kv_tokens // size) + 1
    del trial
    if model.device.type == "cuda":
        # The projections' old memory, and what the check needed, would otherwise stay with this process.
        torch.cuda.empty_cache()
    limit_tokens = min(context, (num_blocks - 1) * size)
    if limit_tokens < context:
        progress(f"room for sequences of {limit_tokens:,} tokens, of a context of {context:,}")
    try:
        made = passes(num_blocks)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"engine.kv_tokens: keys and values of {(num_blocks - 1) * size:,} tokens take "
            f"{num_blocks * block_bytes(shaped.layers, size, model.dtype) / 2**30:.1f} GiB, which are not free beside "
            "the model; lower it, or leave it out and it is chosen by what is free"
        ) from error
    return Prepared(made, num_blocks, limit_tokens, shaped.capturable, shaped.bank, shaped.recorder)


def _kernels(model: DeviceModel, max_running: int, context: int, device: torch.device) -> Kernels:
    if not has_kernels(device):
        return TorchKernels()
    # Of all layers, since some of the memory that they share grows with the heads alone.
    return TritonKernels(
        max_rows=max(2, max_running),
        num_heads=max(layer.num_heads for layer in model.layers),
        value_dim=max(layer.value_dim for layer in model.layers),
        max_length=context,
        device=device,
    )


def check_passes(passes: DevicePasses, token_ids: np.ndarray) -> torch.Tensor:
    """float32 [T, V]: logits of all tokens, computed in two chunks, the second also as a padded batch, one decoding
    row, and one that reads its prompt together with a row just like it."""
    state, length = passes.state, len(token_ids)
    table = SlotTable(2, state.block_size)
    request = Request(
        id="check", prompt_ids=token_ids.astype(np.int32), sampling=Sampling(max_tokens=1), seed=0
    )
    num_blocks = -(-length // state.block_size)
    for _ in range(2):
        sequence = new_sequence(request, length + 1)
        table.place(sequence)
        table.blocks[sequence.slot, :num_blocks] = np.arange(num_blocks, 0, -1)
    state.tables[:2, :num_blocks] = torch.from_numpy(table.blocks[:, :num_blocks]).to(state.tables)
    cut = length // 2
    logits = [
        passes.all_logits([Piece(0, a, token_ids[a:b], table.blocks[0])]).clone()
        for a, b in ((0, cut), (cut, length - 2))
    ]
    padded_RV = _padded_logits(passes, Piece(0, cut, token_ids[cut : length - 2], table.blocks[0]))
    logits[-1][-len(padded_RV) :] = padded_RV
    for at, slots in ((length - 2, np.array([0])), (length - 1, np.array([0, 1]))):
        table.computed[slots] = at
        state.last_token[slots] = int(token_ids[at])
        batch = passes.batch(2, sharing=len(slots) > 1)
        batch.fill(table, slots, state, SharedPromptFinder().find(table, slots))
        passes.decode(batch)
        logits.append(passes.logits[:1].clone())
    return torch.cat(logits)


def _padded_logits(passes: DevicePasses, piece: Piece) -> torch.Tensor:
    """float32 [R, V]: of the piece's last rows, as many as there is memory for, in a batch with rows of padding."""
    layout = lay_out([piece], passes.state.block_size)
    wanted = np.arange(layout.num_rows)[-len(passes.logits) :]
    batch = PromptBatch(layout.num_rows + _PADDING_ROWS, len(wanted), passes.state.device)
    batch.fill(layout, wanted)
    passes.prompts(batch)
    return passes.logits[: len(wanted)].clone()


def beside_kv_bytes(pass_bytes: int) -> int:
    """What is kept free of keys and values for passes that need so much. Twice that: graphs keep memory of their
    own beside that of plain passes."""
    return 2 * pass_bytes + _SPARE_BYTES


def most_blocks(context: int, max_running: int, block_size: int) -> int:
    """More are of no use: every request has its whole context, and one block is nobody's."""
    return max_running * -(-context // block_size) + 1


def _blocks_that_fit(passes: DevicePasses, layers: Sequence[LayerShape], limits: DeviceLimits) -> int:
    """Blocks for which there is memory beside the largest prefill and decode pass."""
    state = passes.state
    context = state.row_blocks * state.block_size
    rows, nowhere = (
        np.zeros(limits.prefill_tokens, dtype=np.int64),
        np.zeros(state.row_blocks, dtype=np.int64),
    )
    pieces = [
        Piece(state.scoring_slot, 0, rows[at : at + context], nowhere)
        for at in range(0, limits.prefill_tokens, context)
    ]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(state.device)
    before = torch.cuda.memory_allocated(state.device)
    layout = lay_out(pieces, state.block_size)
    passes.prefill(layout, layout.last_rows(range(len(pieces))))
    passes.decode(passes.batch(max(2, limits.max_running), sharing=True))
    torch.cuda.synchronize(state.device)
    needed = torch.cuda.max_memory_allocated(state.device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(state.device)
    allowed = int(total * limits.memory_share) - torch.cuda.memory_allocated(state.device)
    room = min(free, allowed) - beside_kv_bytes(needed)
    per_block = block_bytes(layers, state.block_size, state.pools[0].dtype)
    if room < 2 * per_block:
        raise ConfigError(
            f"engine.memory_share: of {total / 2**30:.1f} GiB ({free / 2**30:.1f} free), passes of "
            f"{limits.prefill_tokens} prompt tokens and {limits.max_running} requests leave none for keys and "
            "values; raise it, lower engine.max_running, or use a smaller model"
        )
    return room // per_block
