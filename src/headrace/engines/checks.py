"""Whether a model can be computed here at all, found out before the first request.

``check_model`` runs the model once as it is, with eager attention, and once through the paged path with
shuffled blocks, two chunks and a decode row. It refuses by name a model whose attention is not called
exactly once a layer (linear or convolutional layers, models outside the attention interface) or whose
log-probabilities differ (chunked attention, ALiBi, an option that is not honoured).

It then tries out how matrix products and attention round on this machine (``ModelFacts``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from headrace.engines.passes import TRIM_STEP, ForwardPass
from headrace.errors import ModelError
from headrace.models.paged_attention import PAGED, KvTensors, LayerCall, register

_TOLERANCE = 1e-3
"""Largest difference of a log-probability in float32."""
_NARROW_TOLERANCE = 0.1
"""In bfloat16 and float16, of the median difference over the spread of the log-probabilities: both sides round, and
where a router is near a tie they may take different experts for a token."""
_LONGEST_PROBE = 1100
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention"}
_ROW_CHOICES = (4, 8, 16, 32, 64)
_WIDE_ROWS = 128
_LONGEST_PADDING = 1536
_NUM_PASSES = 3
_UNSTATED_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What bit-identical results need of the passes of a model on this machine."""

    min_rows: int
    """Rows a pass is padded to: from there on a row's products do not depend on how many there are."""
    trims: bool
    """Whether attention gives the same bits for every key-value length padded to a ``TRIM_STEP``."""
    bare_head: bool
    """Whether the logits are the output layer's alone, with nothing scaled or capped after it."""


def check_model(model: PreTrainedModel, *, block_size: int) -> ModelFacts:
    """Switch the model to paged attention, or raise ModelError and say what stands in the way."""
    config, name = model.config.get_text_config(), type(model).__name__
    check_layer_kinds(config, name)
    token_ids = probe_tokens(config)
    expected = plain_logits(model, token_ids)
    register()
    model.set_attn_implementation(PAGED)
    if model.config._attn_implementation != PAGED:
        raise ModelError(f"{name} does not use transformers' attention interface; choose another model.")
    got, calls = _paged_logits(model, token_ids, block_size, bare_head=False)
    counts = Counter(call.layer for call in calls)
    wrong = [layer for layer in range(config.num_hidden_layers) if counts[layer] != _NUM_PASSES]
    if wrong or len(counts) != config.num_hidden_layers:
        raise ModelError(
            f"{name} mixes tokens outside the attention interface (layers {wrong[:4]}); choose a model whose "
            "every layer is softmax attention."
        )
    check_agreement(model, got, expected)
    bare_head = _same_logits(got, _paged_logits(model, token_ids, block_size, bare_head=True)[0], model.dtype)
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return ModelFacts(min_rows=_ROW_CHOICES[0], trims=True, bare_head=bare_head)
    kinds = {call._replace(layer=0) for call in calls}
    trims = all(_length_is_free(kind) for kind in kinds)
    shapes = {(m.in_features, m.out_features) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    return ModelFacts(min_rows=stable_rows(shapes), trims=trims, bare_head=bare_head)


def plain_logits(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [T, V] of the model as it is, with eager attention; the model keeps that attention."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(input_ids=token_ids.to(model.device).unsqueeze(0), use_cache=False).logits[0].float()


def check_agreement(model: PreTrainedModel, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise ModelError unless both logits [T, V] give the same log-probabilities."""
    expected_lp = expected.log_softmax(-1)
    difference = got.log_softmax(-1) - expected_lp
    if model.dtype == torch.float32:
        error, limit = float(difference.abs().max()), _TOLERANCE
    else:
        error, limit = float(difference.abs().median() / expected_lp.std()), _NARROW_TOLERANCE
    if not error <= limit:
        raise ModelError(
            f"{type(model).__name__} computed with paged attention differs from a plain forward (by {error:.2g}, over "
            f"{limit:g}), so it uses something the engine lacks; choose another model."
        )


def num_token_ids(model: PreTrainedModel) -> int:
    """Of which the model has an embedding."""
    return int(model.get_input_embeddings().weight.shape[0])


def context_tokens(config: PretrainedConfig) -> int:
    """Positions the model was made for; a guess where it does not say."""
    return int(getattr(config, "max_position_embeddings", None) or _UNSTATED_CONTEXT)


def _length_is_free(call: LayerCall) -> bool:
    """Whether padding a row's keys and values further leaves the bits of its attention alone."""
    if not call.fused:
        return False
    generator = torch.Generator().manual_seed(3)
    query = torch.randn((1, 1, call.heads_per_kv, call.key_dim), generator=generator)
    key = torch.randn((1, 1, _LONGEST_PADDING, call.key_dim), generator=generator)
    value = torch.randn((1, 1, _LONGEST_PADDING, call.value_dim), generator=generator)
    mask = torch.full((1, 1, 1, _LONGEST_PADDING), float("-inf"))
    for length in (5, 37, 130, 300, 450, 700, 1000):
        mask[..., :length] = 0.0
        outputs = [
            torch.nn.functional.scaled_dot_product_attention(
                query, key[:, :, :padded], value[:, :, :padded], attn_mask=mask[..., :padded]
            )
            for padded in range(-(-length // TRIM_STEP) * TRIM_STEP, _LONGEST_PADDING + 1, 3 * TRIM_STEP)
        ]
        if not all(torch.equal(output, outputs[0]) for output in outputs):
            return False
    return True


def stable_rows(shapes: Iterable[tuple[int, int]]) -> int:
    """Rows from which products of these (inputs, outputs) give a row the same bits whatever their number."""
    return max((_stable_rows_for(*shape) for shape in shapes), default=_ROW_CHOICES[0])


def _stable_rows_for(num_in: int, num_out: int) -> int:
    generator = torch.Generator().manual_seed(num_in * 31 + num_out)
    weight = torch.randn((num_out, num_in), generator=generator)
    x = torch.randn((_WIDE_ROWS, num_in), generator=generator)
    wide = torch.nn.functional.linear(x, weight)
    for rows in _ROW_CHOICES:
        sizes = range(rows, min(2 * rows, _WIDE_ROWS))
        if all(torch.equal(torch.nn.functional.linear(x[:n], weight), wide[:n]) for n in sizes):
            return rows
    return _ROW_CHOICES[-1]


def check_layer_kinds(config: PretrainedConfig, name: str) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - _KNOWN_LAYERS:
        raise ModelError(
            f"{name} has layers of kind {', '.join(sorted(kinds - _KNOWN_LAYERS))}, which the engine cannot "
            "page; choose a model with full or sliding-window attention."
        )
    if getattr(config, "alibi", False):
        raise ModelError(f"{name} uses ALiBi position biases, which the engine lacks; choose another model.")


def probe_tokens(config: PretrainedConfig) -> torch.Tensor:
    """Random tokens, more than the sliding window holds where that is short enough to try."""
    window = getattr(config, "sliding_window", None) or 0
    length = window + 24 if window + 24 <= _LONGEST_PROBE else 56
    length = min(length, context_tokens(config))
    generator = torch.Generator().manual_seed(17)
    return torch.randint(0, int(config.vocab_size), (length,), generator=generator)


def _same_logits(whole: torch.Tensor, bare: torch.Tensor, dtype: torch.dtype) -> bool:
    """In a narrow type the model's own head rounds its logits, which the bare one does not."""
    if dtype == torch.float32:
        return torch.equal(whole, bare)
    return float((whole - bare).abs().max()) <= 0.05 * max(1.0, float(whole.abs().max()))


def _paged_logits(
    model: PreTrainedModel, token_ids: torch.Tensor, block_size: int, *, bare_head: bool
) -> tuple[torch.Tensor, list[LayerCall]]:
    """All logits in two chunks and one decode row, over blocks in reverse order."""
    length = len(token_ids)
    num_blocks = -(-length // block_size) + 1
    kv = KvTensors(num_blocks=num_blocks, block_size=block_size)
    forward = ForwardPass(model, kv, limit_tokens=length, min_rows=4, bare_head=bare_head)
    table = np.zeros(forward.num_table_entries(length), dtype=np.int64)
    table[: num_blocks - 1] = np.arange(num_blocks - 1, 0, -1)
    ids, cut = token_ids.numpy(), length // 2
    parts = [forward.rows() for _ in range(_NUM_PASSES)]
    parts[0].add_chunk(ids[:cut], 0, table)
    parts[1].add_chunk(ids[cut:-1], cut, table)
    parts[2].add_each(ids[-1:], np.array([length - 1]), table[None], np.zeros(1, dtype=np.int64))
    logits, calls = [], []
    for rows in parts:
        part, seen = forward.traced_logits(rows, np.arange(rows.num_rows))
        logits.append(part)
        calls += seen
    return torch.cat(logits), calls
