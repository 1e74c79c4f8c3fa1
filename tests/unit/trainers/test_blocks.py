from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._inductor import compile_fx
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from headrace.data.packing import pack
from headrace.memory.architecture import examine
from headrace.models import shared_prefix
from headrace.models.float_residual import keep_float_residual, residual_dtype
from headrace.models.joined_linear import QUERY_KEY_VALUE, join_linears
from headrace.models.packed_attention import build_layout, use_packed_attention
from headrace.models.shared_prefix import segment_bounds
from headrace.models.turned_heads import turn_heads
from headrace.trainers.blocks import (
    ROOM_SHARE,
    DecoderBlocks,
    compile_lean,
    decoder_layers,
    layers_to_recompute,
)
from headrace.trainers.logprobs import RowTensors, row_tensors, token_logprobs
from headrace.types import TrainBatch


@pytest.mark.parametrize(("free", "expected"), [(28_000, 0), (27_999, 2), (15_000, 16), (500, 28)])
def test_layers_are_recomputed_only_as_far_as_memory_asks(free: float, expected: int) -> None:
    """28 layers of 1000 bytes, of which an input is 100."""
    found = layers_to_recompute(10, num_layers=28, bytes_per_token=2_800.0, input_bytes=10.0, free_bytes=free)
    assert found == expected


def test_recomputed_layers_give_the_same_bits(
    make_model: Callable[..., PreTrainedModel], make_batch: Callable[..., TrainBatch]
) -> None:
    (row,) = pack(make_batch(num_samples=5).samples, row_tokens=10_000)
    tensors = row_tensors(row, device="cpu")
    found = []
    for num_recomputed in (0, 1, 2):
        model = make_model()
        use_packed_attention(model)
        names = list(model.state_dict())
        blocks = DecoderBlocks(model, compiled=False)
        blocks.num_recomputed = num_recomputed
        logprobs, _ = token_logprobs(model, tensors)
        logprobs.sum().backward()
        assert list(model.state_dict()) == names
        found.append([logprobs.detach(), *(p.grad for p in model.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("num_recomputed", "free"),
    [(0, [1500, 2500, 3500]), (1, [1500, 2500, 3500]), (2, [1500, 2500, 2500])],
)
def test_the_backward_tells_what_memory_it_has_freed(
    make_model: Callable[..., PreTrainedModel],
    make_batch: Callable[..., TrainBatch],
    num_recomputed: int,
    free: list[int],
) -> None:
    """Of three layers that keep 1,000 bytes each, the last first; layers that are recomputed have kept nothing."""
    (row,) = pack(make_batch(num_samples=2).samples, row_tokens=10_000)
    tensors, model, told = row_tensors(row, device="cpu"), make_model(num_layers=3), []
    use_packed_attention(model)
    blocks = DecoderBlocks(model, compiled=False)
    blocks.num_recomputed, blocks.bytes_per_token = num_recomputed, 3.0
    with blocks.telling_room(told.append, num_tokens=1000, slope_bytes=4000, gradient_bytes=500):
        logprobs, _ = token_logprobs(model, tensors)
    token_logprobs(model, tensors)[0].sum().backward()
    assert not told, "this forward was outside"
    logprobs.sum().backward()
    assert told == pytest.approx([ROOM_SHARE * num_bytes for num_bytes in free], abs=1)


def test_gradients_to_come_are_no_room(
    make_model: Callable[..., PreTrainedModel], make_batch: Callable[..., TrainBatch]
) -> None:
    (row,) = pack(make_batch(num_samples=2).samples, row_tokens=10_000)
    tensors, model, told = row_tensors(row, device="cpu"), make_model(num_layers=3), []
    use_packed_attention(model)
    blocks = DecoderBlocks(model, compiled=False)
    blocks.bytes_per_token = 3.0
    with blocks.telling_room(told.append, num_tokens=1000, slope_bytes=4000, gradient_bytes=9000):
        logprobs, _ = token_logprobs(model, tensors)
    logprobs.sum().backward()
    assert told == [0, 0, 0]


def test_what_layers_keep_is_divided_by_the_tokens_that_were_computed(
    make_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use = 0

    def keep_seven_bytes_a_token(row: RowTensors) -> torch.Tensor:
        nonlocal in_use
        in_use += 7 * row.token_ids_T.numel()
        return torch.zeros(0)

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: in_use)
    blocks = DecoderBlocks(make_model(), compiled=False, hidden=keep_seven_bytes_a_token)
    assert blocks._probe() == 7


def half_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the flash kernels, which a CPU does not have: half of the queries."""
    monkeypatch.setattr(
        shared_prefix,
        "flash_forward",
        lambda query, *_: (query * 0.5, query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)),
    )
    monkeypatch.setattr(
        shared_prefix,
        "flash_backward",
        lambda grad, query, key, value, *_: (grad * 0.5, torch.zeros_like(key), torch.zeros_like(value)),
    )


def qwen_like(family: str) -> PretrainedConfig:
    """With the proportions of qwen2-1.5b."""
    configs = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
    return configs[family](
        vocab_size=32, hidden_size=192, intermediate_size=1120, num_hidden_layers=2, num_attention_heads=12,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip


def run_layer(model: PreTrainedModel, forward: Callable[..., torch.Tensor]) -> torch.Tensor:
    """What a layer makes of a row of two sequences."""
    lengths = [40, 56]
    layout = replace(build_layout(lengths), bounds=segment_bounds(lengths, [-1, -1], device="cpu"))
    positions = torch.arange(sum(lengths))[None]
    rows = torch.randn(1, 96, 192, generator=torch.Generator().manual_seed(1), dtype=model.dtype)
    tables = model.model.rotary_emb(rows, positions)
    return forward(
        rows.to(residual_dtype(model)).requires_grad_(),
        position_embeddings=tables,
        packed_layout=layout,
        attention_mask=None,
        position_ids=positions,
    )


@pytest.mark.parametrize(
    ("family", "joined", "turned"),
    [
        *((family, joined, False) for family in ("qwen2", "llama", "qwen3") for joined in (False, True)),
        *((family, True, True) for family in ("qwen2", "llama")),
    ],
)
def test_a_compiled_layer_keeps_what_the_plan_says(
    family: str, joined: bool, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_attention(monkeypatch)
    # The compiler's own division into forward and backward, without code whose compilation takes seconds.
    monkeypatch.setattr(compile_fx, "compile_fx", aot_eager_decomp_partition)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(qwen_like(family), dtype=torch.bfloat16).eval()
    use_packed_attention(model)
    keep_float_residual(model)
    layer = decoder_layers(model)[0]
    if joined:
        assert join_linears(layer, (QUERY_KEY_VALUE,)) == 2
    if turned:
        assert turn_heads(model) == 1
    gradients = []
    for forward in (layer.forward, compile_lean(layer.forward)):
        output = run_layer(model, forward)
        kept = getattr(output.grad_fn, "saved_tensors", ())
        output.float().square().sum().backward()
        gradients.append(torch.cat([parameter.grad.double().flatten() for parameter in layer.parameters()]))
        model.zero_grad()
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    places = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    kept_bytes = sum(size for place, size in places.items() if place not in own) / 96
    planned = examine(qwen_like(family), torch.bfloat16).compiled.layers / 2
    # Rotary tables are kept once for all layers; beside each norm there is a number a row.
    assert planned < kept_bytes < 1.02 * planned
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 0.01
