"""The bench of recorded routes runs, draws the same on both sides and draws its table."""

from __future__ import annotations

import pytest
import torch

from headrace.bench import routes
from headrace.bench.rollout_workload import Workload
from headrace.bench.shapes import SHAPES, build_random_model, shape_config
from headrace.errors import ConfigError


def small(shape: str, *, device: str) -> torch.nn.Module:
    config = shape_config(shape)
    config.hidden_size, config.head_dim, config.vocab_size = 64, 16, 50
    config.num_hidden_layers, config.max_position_embeddings = 2, 64
    config.num_attention_heads, config.num_key_value_heads, config.intermediate_size = 4, 2, 64
    config.moe_intermediate_size = 16
    return build_random_model(config, device=device, dtype=torch.float32)


def test_both_sides_are_measured(monkeypatch):
    monkeypatch.setattr(routes, "create_random_model", small)
    workload = Workload(num_prompts=2, group_size=2, prompt_tokens=6, mean_tokens=4.0, cap_tokens=8)
    figures = routes.run("moe-small", workload=workload, repeats=2, device="cpu")
    assert figures["route_bytes_per_token"] == 2 * 8
    assert len(figures["overheads"]) == 2 and figures["live"]["seconds"] > 0
    assert routes.table(figures).row_count == 2


def test_a_dense_shape_has_nothing_to_record(monkeypatch):
    monkeypatch.setattr(routes, "create_random_model", small)
    with pytest.raises(ConfigError, match="use moe-small"):
        routes.run("qwen2-0.5b", device="cpu")


def test_the_small_mixture_is_small():
    with torch.device("meta"):
        model = build_random_model(shape_config("moe-small"), device="meta", dtype=torch.bfloat16)
    assert 2.5e9 < sum(p.numel() for p in model.parameters()) < 3e9
    assert SHAPES["moe-small"]["num_experts_per_tok"] == 8
