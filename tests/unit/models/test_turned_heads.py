"""Heads turned by an op of their own: what it gives, its gradients, and which attentions use it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GlmConfig,
    GptOssConfig,
    HeliumConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

from headrace.models import shared_prefix
from headrace.models.float_residual import keep_float_residual
from headrace.models.gated_layer import join_gates
from headrace.models.joined_linear import QUERY_KEY_VALUE, JoinedLinear, join_linears
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.packed_attention import build_layout, use_packed_attention
from headrace.models.shared_prefix import segment_bounds
from headrace.models.turned_heads import turn_heads
from headrace.trainers.placement import place_weights
from headrace.trainers.ranks import ALONE

LAYERS = 3
SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
MIXED = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": ["full_attention", *["sliding_attention"] * 2],
}
TURNED: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, some windows": Qwen2Config(**SIZES, **MIXED),
    "llama": LlamaConfig(**SIZES, head_dim=8),
    "mistral": MistralConfig(**SIZES, head_dim=24, sliding_window=4),
}
LEFT_ALONE: dict[str, PretrainedConfig] = {
    "norms": Qwen3Config(**SIZES, head_dim=16),
    "caps": Gemma2Config(**SIZES, head_dim=16),
    "sinks": GptOssConfig(**SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1),
    "half of a head turned": StableLmConfig(**SIZES, partial_rotary_factor=0.5),
    "a part of a head turned": PhiConfig(**SIZES, partial_rotary_factor=0.5),
    "odd heads": LlamaConfig(**SIZES, head_dim=12),
    "other pairs, Cohere": CohereConfig(**SIZES),
    "other pairs, Helium": HeliumConfig(**SIZES, head_dim=16),
    "other pairs, Glm": GlmConfig(**SIZES, head_dim=16, partial_rotary_factor=1.0),
}
ROWS = {"plain": ([9, 4, 7], None), "shared": ([6, 5, 3, 4, 2], [-1, 0, 0, 0, -1])}
Function = Callable[..., tuple[torch.Tensor, ...]]


def made(config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16, *, joined: bool = True):
    """Ready to be trained, but for the heads; no two parameters alike."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        middle = 1.0 if "norm" in name else 0.0
        parameter.data = middle + torch.randn(parameter.shape) * (0.3 if parameter.dim() == 1 else 0.1)
    model = model.to(dtype)
    keep_float_residual(model)
    use_packed_attention(model)
    if joined:
        join_linears(model, (QUERY_KEY_VALUE,))
        join_gates(model)
    return model


def run(model: PreTrainedModel, row: str = "shared") -> dict[str, torch.Tensor]:
    """What the last layer gives, and all gradients."""
    lengths, parents = ROWS[row]
    num_tokens = sum(lengths)
    model.zero_grad()
    hidden = model.get_decoder()(
        input_ids=torch.arange(num_tokens)[None] * 5 % 97,
        position_ids=torch.arange(num_tokens)[None],
        use_cache=False,
        packed_layout=build_layout(lengths, parents),
    ).last_hidden_state
    pull = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    (hidden.float() * pull).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach(), **grads}


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def is_turned(attention: nn.Module) -> bool:
    return "known_attending" in vars(attention)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that heads are turned on a CPU."""
    from headrace.models import turned_heads

    seen, real = [], turned_heads.rotated
    monkeypatch.setattr(turned_heads, "rotated", lambda x, by: seen.append(x.shape[1]) or real(x, by))
    return seen


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", TURNED)
def test_a_model_is_as_near_to_float32_as_before(name: str, row: str, calls: list[int]) -> None:
    model = made(TURNED[name])
    exact = run(made(TURNED[name], torch.float32, joined=False), row)
    before = run(model, row)
    assert not calls and turn_heads(model) == LAYERS
    found = run(model, row)
    # Queries and keys of each layer, there and back.
    assert calls.count(4) == calls.count(2) == 2 * LAYERS
    assert found.keys() == before.keys() == exact.keys()
    assert all(found[part].dtype == before[part].dtype for part in before)
    gaps = {part: (apart(found[part], right), apart(before[part], right)) for part, right in exact.items()}
    # Some gradients of biases are small differences, of which rounding takes a part that depends on chance.
    assert all(now < 1.5 * then + 0.02 for now, then in gaps.values()), gaps
    now, then = (sum(side) for side in zip(*gaps.values(), strict=True))
    assert now < 1.1 * then


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_attention_of_another_form_is_left_alone(name: str) -> None:
    assert turn_heads(made(LEFT_ALONE[name])) == 0


def test_what_drops_a_part_in_training_is_computed_by_the_class_then(calls: list[int]) -> None:
    config = LlamaConfig(**SIZES, head_dim=16, attention_dropout=0.1)
    assert turn_heads(made(config).train()) == 0
    model = made(config)
    assert turn_heads(model) == LAYERS
    run(model.train())
    assert not calls
    run(model.eval())
    assert calls


def test_a_hook_that_comes_later_is_called(calls: list[int]) -> None:
    model = made(TURNED["qwen2"])
    assert turn_heads(model) == LAYERS
    hooked(model)
    run(model)
    assert not calls


def test_angles_of_a_part_of_a_head_are_no_angles_of_it() -> None:
    model = made(TURNED["llama"])
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:2]
    assert turn_heads(model) == 0


def hooked(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda *_: None)


def with_adapters(model: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["v_proj"]))


def with_own_forward(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.forward = lambda *_, **__: None


@pytest.mark.parametrize("change", [hooked, with_own_forward])
def test_what_somebody_changed_is_left_alone(change: Callable[[PreTrainedModel], None]) -> None:
    model = made(TURNED["qwen2"])
    change(model)
    assert turn_heads(model) == 0


def test_adapters_and_products_apart_and_float32_are_left_alone() -> None:
    model = made(TURNED["qwen2"], joined=False)
    assert turn_heads(model) == 0
    with_adapters(model)
    join_linears(model, (QUERY_KEY_VALUE,))
    assert turn_heads(model) == 0
    assert turn_heads(made(TURNED["qwen2"], torch.float32)) == 0


class Doubling(nn.Module):
    def forward(self, _x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        return 2 * product


def test_what_is_put_beside_a_product_later_counts(calls: list[int]) -> None:
    models = [made(TURNED["qwen2"]) for _ in range(2)]
    assert turn_heads(models[0]) == LAYERS
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.q_proj.beside = Doubling()
    found, expected = (run(model) for model in models)
    assert not calls and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_row_that_is_not_packed_is_computed_by_the_class(calls: list[int]) -> None:
    models = [made(TURNED["qwen2"]) for _ in range(2)]
    turn_heads(models[0])
    ids = torch.arange(12)[None]
    found = []
    for model in models:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            # Into a cache, which it can continue from.
            kept = model(input_ids=ids).past_key_values
            found.append(model(input_ids=ids[:, :1], past_key_values=kept).logits)
    assert not calls and torch.equal(*found)


def test_a_copy_is_turned_by_itself() -> None:
    model = made(TURNED["qwen2"])
    turn_heads(model)
    twin = copy.deepcopy(model)
    for one, other in zip(model.model.layers, twin.model.layers, strict=True):
        assert is_turned(other.self_attn) and other.self_attn.forward.__self__ is other.self_attn
        assert one.self_attn.forward.__self__ is one.self_attn


def test_layers_share_one_graph_for_rows_of_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention as on a GPU, which compilers do not look into."""
    monkeypatch.setattr(
        shared_prefix,
        "flash_forward",
        lambda query, *_: (query * 0.5, query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)),
    )
    models = [made(TURNED["qwen2"]) for _ in range(2)]
    assert turn_heads(models[0]) == LAYERS
    torch._dynamo.reset()
    graphs = []

    def look(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    for layer in models[0].model.layers:
        layer.forward = torch.compile(layer.forward, backend=look, dynamic=True, fullgraph=True)
    for num_tokens in (20, 33, 7):
        positions = torch.arange(num_tokens)[None]
        bounds = segment_bounds([num_tokens], [-1], device="cpu")
        given = {
            "position_embeddings": models[0].model.rotary_emb(torch.zeros(1).bfloat16(), positions),
            "packed_layout": replace(build_layout([num_tokens]), bounds=bounds),
            "attention_mask": None,
            "position_ids": positions,
        }
        x = torch.randn(1, num_tokens, 64).requires_grad_()
        for layer, twin in zip(*(model.model.layers for model in models), strict=True):
            torch.testing.assert_close(layer(x, **given), twin(x, **given), rtol=0.02, atol=0.02)
    (graph,) = graphs
    assert sum("turned_heads" in str(node.target) for node in graph.graph.nodes) == 1


HEADS, KEYS, DIM = 4, 2, 16


def given(num_rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """A product, and cosines and sines of angles that are not alike in both halves."""
    torch.manual_seed(num_rows)
    product = torch.randn(num_rows, (HEADS + 2 * KEYS) * DIM).to(dtype).requires_grad_()
    return [product, *torch.randn(2, num_rows, DIM).to(dtype)]


def by_op(product: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.ops.headrace.turned_heads(product, cos, sin, HEADS)


def plain(product: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As transformers does."""
    query, key, value = product.unflatten(1, (-1, DIM)).split((HEADS, KEYS, KEYS), dim=1)
    cos, sin = cos[:, None], sin[:, None]

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return turned(query), turned(key), value


def recomputed(function: Function) -> Function:
    return lambda *x: checkpoint(function, *x, use_reentrant=False)


def compiled(function: Function) -> Function:
    """With the compiler's own division into forward and backward."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=True, fullgraph=True, backend="aot_eager_decomp_partition")


@pytest.mark.parametrize("way", [lambda f: f, recomputed, compiled], ids=["eager", "recomputed", "compiled"])
@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_values_and_gradients_are_those_of_the_plain_form(
    way: Callable[[Function], Function], dtype: torch.dtype, gap: float
) -> None:
    function = way(by_op)
    for num_rows in (5, 9, 0):
        tensors = given(num_rows, dtype)
        exact = [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
        found, right = function(*tensors), plain(*exact)
        pulls = [torch.randn_like(part) for part in found]
        (grad,) = torch.autograd.grad(found, tensors[0], pulls)
        (right_grad,) = torch.autograd.grad(right, exact[0], [pull.double() for pull in pulls])
        for one, other in zip((*found, grad), (*right, right_grad), strict=True):
            assert one.dtype == dtype and one.is_contiguous()
            torch.testing.assert_close(one.double(), other, rtol=gap, atol=1e-5)


def test_a_head_that_nothing_follows_from_has_no_gradient() -> None:
    tensors = given(3, torch.float32)
    by_op(*tensors)[2].sum().backward()
    (grad,) = (tensor.grad for tensor in tensors if tensor.requires_grad)
    assert torch.equal(grad[:, -KEYS * DIM :], torch.ones(3, KEYS * DIM)) and not grad[:, : -KEYS * DIM].any()


def test_the_op_is_what_torch_asks_of_one() -> None:
    torch.library.opcheck(torch.ops.headrace.turned_heads.default, (*given(5, torch.float32), HEADS))


def test_the_product_is_not_kept() -> None:
    tensors = given(5, torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        by_op(*tensors)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in tensors[1:]}


def test_trainers_on_a_cpu_compute_as_before(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, vocab_size=61, hidden_size=64, num_layers=1, context_tokens=64)
    weights, _ = place_weights(
        load_model(tmp_path), torch.bfloat16, None, False, ranks=ALONE, expert_ranks=1, offload="none"
    )
    (layer,) = weights.policy.model.layers
    assert not is_turned(layer.self_attn) and type(layer.self_attn.q_proj) is JoinedLinear
