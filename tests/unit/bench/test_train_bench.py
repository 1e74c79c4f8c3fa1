from __future__ import annotations

import json

import pytest
import torch

from headrace.bench import train
from headrace.bench.shapes import SHAPES, build_random_model, shape_config
from headrace.bench.step_workload import StepWorkload
from headrace.bench.train import measure, model_flops, random_samples
from headrace.data.packing import pack
from headrace.errors import ConfigError
from headrace.models.joined_linear import join_linears

WORKLOAD = StepWorkload(num_groups=2, group_size=3, prompt_tokens=12, completion_tokens=4)


def small_config():
    config = shape_config("qwen2-0.5b")
    config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size = 2, 64, 96, 50
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    return config


def small_model():
    return build_random_model(small_config(), device="cpu", dtype=torch.bfloat16)


def test_the_bench_runs_and_sharing_computes_fewer_tokens():
    found = [
        measure(small_model(), WORKLOAD, row_tokens=1000, repeats=1, optimizer=True, share=share)
        for share in (False, True)
    ]
    assert [case["num_tokens"] for case in found] == [6 * 15, 2 * 11 + 6 * 4]
    assert found[1]["model_flops"] < found[0]["model_flops"]
    assert all(case["step_s"] > 0 and case["forward_backward_s"] > 0 for case in found)


def test_a_whole_run_can_be_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train, "create_random_model", lambda *_, **__: small_model())
    figures = train.run(workload=WORKLOAD, repeats=1, optimizer=False, device="cpu")
    assert [case["share_prefixes"] for case in figures["cases"]] == [False, True]
    assert all(case["mfu"] > 0 for case in figures["cases"])
    assert train.table(figures).row_count == 2
    json.dumps(figures)


def test_model_flops_are_those_of_the_weights_and_the_pairs_seen():
    model = small_model()
    samples = random_samples(WORKLOAD, vocab_size=50)
    rows = pack(samples, row_tokens=1000)
    weights = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    expected = 6 * weights * 90 + 6 * 50 * 64 * 24 + 12 * 64 * 2 * 6 * (15 * 16 // 2)
    assert model_flops(model, rows) == expected
    shared = pack(samples, row_tokens=1000, share_prefixes=True)
    saved = 6 * weights * (90 - 46) + 12 * 64 * 2 * 4 * (11 * 12 // 2)
    assert model_flops(model, shared) == expected - saved
    assert join_linears(model) > 0 and model_flops(model, rows) == expected, "joined layers count as before"


def test_shapes_are_built_where_they_are_wanted_with_exact_rotary_tables():
    model = small_model()
    table = model.model.rotary_emb.inv_freq
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, 1e6 ** (-torch.arange(0, 16, 2) / 16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    again = small_model()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert shape_config("qwen2-7b").tie_word_embeddings is False
    assert set(SHAPES) >= {"qwen2-0.5b", "qwen2-1.5b", "qwen2-7b"}
    with pytest.raises(ConfigError, match=r"qwen2-1\.5b"):
        shape_config("gpt-9")
