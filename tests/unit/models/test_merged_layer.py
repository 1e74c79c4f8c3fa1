"""Layers with fewer steps compute what they did; layers of another form are left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from headrace.engines.device_model import DeviceModel, _Probe
from headrace.kernels.rotation import rotated
from headrace.models import merged_layer
from headrace.models.device_attention import attending
from headrace.models.float_residual import keep_float_residual
from headrace.models.merged_layer import is_usual

IDS = torch.arange(40) * 7 % 97
LAYERS = 3
SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["full_attention", *["sliding_attention"] * 2],
}
OLMOE = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}
OLMOE.pop("head_dim")
MERGED = {
    "llama": LlamaConfig(**SIZES),
    "llama, biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral, windows": MistralConfig(**SIZES, sliding_window=8),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, some windows": Qwen2Config(**SIZES, **MIXED),
    "qwen3, some windows": Qwen3Config(**SIZES, **MIXED),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
}
LEFT_ALONE = {"gemma2": Gemma2Config(**SIZES), "olmoe": OlmoeConfig(**OLMOE)}


def made(config, dtype=torch.float32):
    """No two parameters alike, norms and biases included: what is left out or confused is seen."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        middle = 1.0 if "norm" in name else 0.0
        parameter.data = middle + torch.randn(parameter.shape) * (0.3 if parameter.dim() == 1 else 0.1)
    model = model.to(dtype)
    keep_float_residual(model)
    return model


class Attends:
    """Attention in float32, as it is asked for."""

    num_layers = LAYERS

    def attend(self, layer, query_THD, key_TKD, value_TKE, rotation, options):
        if rotation is not None:
            query_THD, key_TKD = rotated(query_THD, rotation), rotated(key_TKD, rotation)
        group = query_THD.shape[1] // key_TKD.shape[1]
        key, value = (x.float().repeat_interleave(group, dim=1) for x in (key_TKD, value_TKE))
        scores = torch.einsum("thd,lhd->htl", query_THD.float(), key) * options.scale
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        back = torch.arange(len(key))[:, None] - torch.arange(len(key))
        hidden = (back < 0) | (back >= (options.window or len(key)))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("htl,lhd->thd", weights, value).to(query_THD.dtype).contiguous()


def logits(model):
    return DeviceModel(model, compiled=False).logits(IDS, torch.arange(len(IDS)), Attends())


def plain(model):
    with torch.no_grad():
        return model(input_ids=IDS[None], use_cache=False).logits[0].float()


def num_merged(model):
    return sum("known_parts" in vars(layer) for layer in model.base_model.layers)


def far(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", [*MERGED, *LEFT_ALONE])
def test_layers_compute_what_the_plain_model_does(name):
    model = made((MERGED | LEFT_ALONE)[name])
    expected = plain(model)
    assert far(logits(model), expected) < 1e-5
    assert num_merged(model) == (LAYERS if name in MERGED else 0)


@pytest.mark.parametrize("name", MERGED)
def test_in_bfloat16_they_are_as_near_as_before(name, monkeypatch):
    model = made(MERGED[name], torch.bfloat16)
    as_it_was, exact = copy.deepcopy(model), plain(copy.deepcopy(model).float())
    found = logits(model)
    assert num_merged(model) == LAYERS
    monkeypatch.setattr(merged_layer, "is_usual", lambda _: False)
    before = logits(as_it_was)
    # A token near a tie may take other experts, hence the median.
    distances = [float((x - exact).abs().median()) for x in (found, before)]
    assert distances[0] < 1.25 * distances[1]


def test_each_layer_is_asked_at_its_own_scale():
    model = made(MERGED["llama"])
    for layer, scale in zip(model.base_model.layers, (0.1, 0.4, 0.9), strict=True):
        layer.self_attn.scaling = scale
    expected = plain(model)
    assert far(logits(model), expected) < 1e-5 and num_merged(model) == LAYERS


@pytest.mark.parametrize("name", ["llama", "qwen3, some windows"])
def test_a_compiled_layer_is_one_graph_that_adds_in_place(name):
    model = made(MERGED[name], torch.bfloat16)
    DeviceModel(model, compiled=False)
    torch._dynamo.reset()
    layer = model.base_model.layers[0]
    sums = torch.randn((1, 5, 64))
    angles = model.base_model.rotary_emb(sums.bfloat16(), torch.arange(5)[None])
    graphs = []

    def look(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad(), attending(probe := _Probe(1)):
        found = torch.compile(layer.forward, backend=look, dynamic=True)(sums, position_embeddings=angles)
    assert found.data_ptr() == sums.data_ptr() and len(probe.layers) == 1
    assert len(graphs) == 1, "no break"


@pytest.mark.slow
def test_each_graph_is_traced_once(tmp_path, monkeypatch):
    """With floats as inputs the compiler begins every layer again, also where its cache has the result."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = DeviceModel(made(MERGED["qwen2"], torch.bfloat16), compiled=True)
    found = model.logits(IDS, torch.arange(len(IDS)), Attends())
    counters = torch._dynamo.utils.counters
    # Rotary embedding, all layers and the last norm.
    assert counters["stats"]["unique_graphs"] == counters["aot_autograd"]["total"] == 3
    assert far(found, plain(made(MERGED["qwen2"]))) < 0.1


class _Doubling(torch.nn.Linear):
    """Stands for a product that something was put beside."""

    def forward(self, x):
        return 2.0 * super().forward(x)


@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj", "self_attn.q_proj"])
def test_products_that_were_replaced_are_asked_for_themselves(name):
    model = made(MERGED["llama"])
    for layer in model.base_model.layers:
        parent, last = layer.get_submodule(name.partition(".")[0]), name.partition(".")[2]
        linear = getattr(parent, last)
        changed = _Doubling(linear.in_features, linear.out_features, bias=False)
        changed.load_state_dict(linear.state_dict())
        setattr(parent, last, changed)
    expected = plain(model)
    assert far(logits(model), expected) < 1e-5 and num_merged(model) == LAYERS


@pytest.mark.parametrize(
    "name", ["self_attn", "self_attn.o_proj", "mlp", "mlp.down_proj", "post_attention_layernorm"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_hooks_do_is_done(name, dtype):
    model = made(MERGED["llama"], dtype)

    def double(_module, _given, result):
        return (2.0 * result[0], *result[1:]) if isinstance(result, tuple) else 2.0 * result

    for layer in model.base_model.layers:
        layer.get_submodule(name).register_forward_hook(double)
    expected = plain(model)
    assert far(logits(model), expected) < (1e-5 if dtype == torch.float32 else 0.1)


def test_attention_that_does_more_is_left_alone(monkeypatch):
    layer = made(MERGED["llama"]).base_model.layers[0]
    assert is_usual(layer)
    own = type(layer.self_attn)

    class Clipping(own):
        def forward(self, hidden_states, **given):
            return own.forward(self, hidden_states.clamp(-1.0, 1.0), **given)

    layer.self_attn.__class__ = Clipping
    assert not is_usual(layer)
    layer.self_attn.__class__ = own
    # An instance's own forward, and the same code with other pairs turned than those half a head apart.
    layer.self_attn.forward = layer.self_attn.forward
    assert not is_usual(layer)
    del layer.self_attn.forward
    assert is_usual(layer)
    monkeypatch.setitem(own.forward.__globals__, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    assert not is_usual(layer)


def test_layers_whose_order_is_another_are_left_alone():
    """The same parts by the same names."""
    layer = made(MERGED["qwen3, some windows"]).base_model.layers[0]
    own, attention = type(layer), type(layer.self_attn)

    class Parallel(own):
        def forward(self, hidden_states, **given):
            attended, _ = self.self_attn(self.input_layernorm(hidden_states), **given)
            return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))

    class Pair(own):
        def forward(self, hidden_states, **given):
            return (own.forward(self, hidden_states, **given),)

    class NormsBehindTheRotation(attention):
        def forward(self, hidden_states, position_embeddings, attention_mask=None, **given):
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            query, key, value = (
                part(hidden_states).view(shape).transpose(1, 2)
                for part in (self.q_proj, self.k_proj, self.v_proj)
            )
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
            attend = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
            made, _ = attend(self, self.q_norm(query), self.k_norm(key), value, attention_mask)
            return self.o_proj(made.reshape(*hidden_states.shape[:-1], -1)), None

    assert is_usual(layer)
    for kind in (Parallel, Pair):
        layer.__class__ = kind
        assert not is_usual(layer)
    layer.__class__ = own
    layer.self_attn.__class__ = NormsBehindTheRotation
    assert not is_usual(layer)
    layer.self_attn.__class__ = attention
    layer.self_attn.q_norm = torch.nn.Identity()
    assert not is_usual(layer)


def test_norms_that_are_there_and_not_used_are_not_used():
    model = made(MERGED["llama"])
    for layer in model.base_model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.LayerNorm(16)
    expected = plain(model)
    assert far(logits(model), expected) < 1e-5 and num_merged(model) == LAYERS


def test_a_sum_that_is_rounded_stays_as_it_is():
    model = AutoModelForCausalLM.from_config(MERGED["qwen2"]).bfloat16()
    DeviceModel(model, compiled=False)
    assert num_merged(model) == 0


def test_half_a_rotation_is_left_to_the_model():
    """Where only a part of a head is rotated, cosines are shorter than the head."""
    model = made(MERGED["llama"])
    rotary = model.base_model.rotary_emb
    rotary.inv_freq = rotary.inv_freq[: len(rotary.inv_freq) // 2]
    assert merged_layer.merge_layers(model, [None] * LAYERS) == 0
