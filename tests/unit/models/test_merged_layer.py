"""Layers with fewer steps compute what they did; layers of another form are left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from headrace.engines.device_model import DeviceModel, _Probe
from headrace.models import merged_layer
from headrace.models.device_attention import attending
from headrace.models.float_residual import keep_float_residual
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.merged_layer import is_usual

IDS = torch.arange(40) * 7 % 97
LAYERS = 3


def tiny(directory, family, dtype=torch.float32):
    make_tiny_model(
        directory, family=family, vocab_size=97, hidden_size=64, num_layers=LAYERS, context_tokens=128, init_std=0.06
    )  # fmt: skip
    model = load_model(directory).to(dtype)
    keep_float_residual(model)
    return model


def logits(model):
    return model.logits(IDS, torch.arange(len(IDS)), _Probe(LAYERS))


def num_merged(model):
    return sum("known_parts" in vars(layer) for layer in model.base_model.layers)


@pytest.mark.parametrize(
    ("family", "merged"),
    [
        ("llama", LAYERS),
        ("qwen2", LAYERS),
        ("qwen3", LAYERS),
        ("qwen3_moe", LAYERS),
        ("gemma2", 0),
        ("olmoe", 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_layers_compute_what_they_did(tmp_path, monkeypatch, family, merged, dtype):
    model = tiny(tmp_path, family, dtype)
    as_it_was = copy.deepcopy(model)
    found = logits(DeviceModel(model, compiled=False))
    assert num_merged(model) == merged
    monkeypatch.setattr(merged_layer, "is_usual", lambda _: False)
    expected = logits(DeviceModel(as_it_was, compiled=False))
    assert num_merged(as_it_was) == 0
    difference = (found - expected).abs() / expected.abs().max()
    if dtype == torch.float32:
        assert float(difference.max()) < 1e-5
    else:
        # Run step by step, a model rounds each part of its rotation; a token near a tie may take other experts then.
        assert float(difference.median()) < 5e-3


def test_a_compiled_layer_is_one_graph_that_adds_in_place(tmp_path):
    model = tiny(tmp_path, "qwen2", torch.bfloat16)
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
        made = torch.compile(layer.forward, backend=look, dynamic=True)(sums, position_embeddings=angles)
    assert made.data_ptr() == sums.data_ptr() and len(probe.layers) == 1
    assert len(graphs) == 1, "no break"


class _Doubling(torch.nn.Linear):
    """Stands for a product that something was put beside."""

    def forward(self, x):
        return 2.0 * super().forward(x)


@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj", "self_attn.q_proj"])
def test_products_that_were_changed_are_asked_for_themselves(tmp_path, monkeypatch, name):
    model = tiny(tmp_path, "qwen2")
    for layer in model.base_model.layers:
        parent = layer.get_submodule(name.partition(".")[0])
        linear = getattr(parent, name.partition(".")[2])
        changed = _Doubling(linear.in_features, linear.out_features, bias=linear.bias is not None)
        changed.load_state_dict(linear.state_dict())
        setattr(parent, name.partition(".")[2], changed)
    as_it_was = copy.deepcopy(model)
    found = logits(DeviceModel(model, compiled=False))
    assert num_merged(model) == LAYERS
    monkeypatch.setattr(merged_layer, "is_usual", lambda _: False)
    assert torch.allclose(found, logits(DeviceModel(as_it_was, compiled=False)), atol=1e-4)


def test_attention_that_does_more_is_left_alone(tmp_path, monkeypatch):
    model = tiny(tmp_path, "llama")
    layer = model.base_model.layers[0]
    assert is_usual(layer)
    own = type(layer.self_attn)

    class Clipping(own):
        def forward(self, hidden_states, **given):
            return own.forward(self, hidden_states.clamp(-1.0, 1.0), **given)

    layer.self_attn.__class__ = Clipping
    assert not is_usual(layer)
    layer.self_attn.__class__ = own
    hook = layer.self_attn.register_forward_hook(lambda *_: None)
    assert not is_usual(layer)
    hook.remove()
    assert is_usual(layer)
    # The same code, and other pairs turned than those half a head apart.
    monkeypatch.setitem(own.forward.__globals__, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    assert not is_usual(layer)


def test_layers_whose_order_is_another_are_left_alone(tmp_path):
    """The same parts by the same names."""
    model = tiny(tmp_path, "qwen3")
    layer = model.base_model.layers[0]
    own, attention = type(layer), type(layer.self_attn)

    class Parallel(own):
        def forward(self, hidden_states, **given):
            attended, _ = self.self_attn(self.input_layernorm(hidden_states), **given)
            return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))

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
    layer.__class__ = Parallel
    assert not is_usual(layer)
    layer.__class__ = own
    layer.self_attn.__class__ = NormsBehindTheRotation
    assert not is_usual(layer)


def test_a_sum_that_is_rounded_stays_as_it_is(tmp_path):
    make_tiny_model(tmp_path, family="qwen2", vocab_size=97, hidden_size=64, num_layers=1, context_tokens=64)
    model = load_model(tmp_path).bfloat16()
    DeviceModel(model, compiled=False)
    assert num_merged(model) == 0


def test_half_a_rotation_is_left_to_the_model(tmp_path):
    """Where only a part of a head is rotated, cosines are shorter than the head."""
    model = tiny(tmp_path, "llama")
    rotary = model.base_model.rotary_emb
    rotary.inv_freq = rotary.inv_freq[: len(rotary.inv_freq) // 2]
    assert merged_layer.merge_layers(model, [None] * LAYERS) == 0
