from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from headrace.bench import mismatch, mismatch_sides, mismatch_with_vllm
from headrace.bench.mismatch import LABELS, Workload, gap, measure
from headrace.bench.mismatch_sides import (
    exact_attention,
    head_rounding,
    model_logprobs,
    packed_rows,
    sample_with_engine,
    score_with_engine,
)
from headrace.bench.mismatch_with_vllm import Peer
from headrace.bench.shapes import build_random_model, shape_config
from headrace.engines.make import torch_engine
from headrace.errors import ConfigError
from headrace.models.packed_attention import use_packed_attention
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.trainers.logprobs import decoder_output, row_tensors
from headrace.trainers.master_weights import compute_copy

VOCAB = 50
WORKLOAD = Workload(num_prompts=3, group_size=2, prompt_tokens=9, completion_tokens=5, row_tokens=40)


def small_model(dtype: torch.dtype = torch.bfloat16):
    config = shape_config("qwen2-0.5b")
    config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size = (
        2,
        64,
        96,
        VOCAB,
    )
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    config.layer_types = config.layer_types[:2]
    # Wide enough that the distributions are not flat and a token in the wrong place is seen.
    config.initializer_range = 0.2
    return build_random_model(config, device="cpu", dtype=dtype)


def sampled(model):
    """Prompts, tokens, and the engine's log-probabilities by decoding and by prefill."""
    engine = torch_engine(model, ledger=TimeLedger(ENGINE_ACTIVITIES), max_running=6, kv_tokens=400)
    prompts = WORKLOAD.prompts(VOCAB)
    tokens, drawn = sample_with_engine(engine, prompts, 5, seed=3)
    return prompts, tokens, drawn, score_with_engine(engine, prompts, tokens)


def shared_rows(model, prompts, tokens):
    use_packed_attention(model)
    return packed_rows(prompts, tokens, row_tokens=40, share_prefixes=True)


def whole_logits(model, prompts, tokens):
    """float32 [S, L, V] by the model's own forward of whole sequences."""
    model.set_attn_implementation("eager")
    ids = torch.from_numpy(np.concatenate([prompts, tokens], axis=1)).long()
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[:, prompts.shape[1] - 1 : -1].float()


def chosen(logits, tokens):
    ids = torch.from_numpy(tokens).long()[..., None]
    return logits.log_softmax(-1).gather(-1, ids)[..., 0].numpy()


def test_in_float32_every_way_gives_the_same_number_for_every_token() -> None:
    twin = small_model(torch.float32)
    prompts, tokens, drawn, scored = sampled(small_model(torch.float32))
    rows = shared_rows(twin, prompts, tokens)
    assert len(rows) > 1 and any((row.parents >= 0).any() for row in rows)
    trained = model_logprobs(twin, rows)
    with exact_attention(twin):
        exact = model_logprobs(twin, rows)
    expected = chosen(whole_logits(twin, prompts, tokens), tokens)
    for found in (drawn, scored, trained, exact):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_exact_attention_rounds_once_and_is_taken_back() -> None:
    model = small_model()
    prompts, tokens, _, _ = sampled(small_model())
    rows = shared_rows(model, prompts, tokens)
    with torch.no_grad():
        before = model_logprobs(model, rows)
        with exact_attention(model):
            exact = model_logprobs(model, rows)
            assert model.config._attn_implementation == "headrace_exact"
        after = model_logprobs(model, rows)
    np.testing.assert_array_equal(before, after)
    assert 0 < np.abs(before - exact).max() < 0.2


def test_head_rounding_is_that_of_the_logits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    prompts, tokens, _, _ = sampled(small_model())
    use_packed_attention(model)
    (row,) = packed_rows(prompts[:1], tokens[:1], row_tokens=40, share_prefixes=False)
    with torch.no_grad():
        hidden = decoder_output(model, row_tensors(row, device="cpu"))[8:13]
        rounded = chosen(model.lm_head(hidden).float()[None], tokens[:1])
        exact = chosen((hidden.float() @ model.lm_head.weight.float().T)[None], tokens[:1])
    assert np.abs(rounded - exact).max() > 0
    monkeypatch.setattr(mismatch_sides, "chunk_tokens", lambda weight: 2)
    np.testing.assert_allclose(head_rounding(model, [row]), rounded - exact, atol=1e-6)
    in_float32 = head_rounding(compute_copy(model, torch.float32), [row])
    np.testing.assert_allclose(in_float32, np.zeros((1, 5)), atol=1e-6)


def test_all_lines_of_a_run_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mismatch, "create_random_model", lambda *_, **__: small_model())
    figures = mismatch.run("qwen2-0.5b", workload=WORKLOAD, device="cpu")
    gaps = figures["gaps"]
    assert all(0 <= found["mean"] <= found["p99"] <= found["max"] < 0.5 for found in gaps.values())
    assert all(found["num_tokens"] == 30 for found in gaps.values())
    assert gaps["mismatch"]["mean"] > 0 and gaps["compiling"]["max"] == 0
    assert gaps["engine_error"]["mean"] > 0 and gaps["trainer_error"]["mean"] > 0
    assert mismatch.table(figures).row_count == len(gaps) == 8
    json.dumps(figures)


def test_the_same_seed_gives_the_same_figures() -> None:
    prompts = WORKLOAD.prompts(VOCAB)
    assert measure(small_model(), prompts, WORKLOAD) == measure(small_model(), prompts, WORKLOAD)


def test_a_peer_is_held_against_both_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer here is the same model with known offsets, so its gaps are known."""

    def peer(checkpoint, prompts, num_tokens, python):
        assert (checkpoint / "config.json").is_file() and num_tokens == 5
        tokens = np.random.default_rng(5).integers(0, VOCAB, (6, 5)).astype(np.int32)
        exact = chosen(whole_logits(small_model().float(), prompts, tokens), tokens)
        trained = {"bfloat16": exact + np.float32(0.75), "float32": exact + np.float32(0.5)}
        return Peer(token_ids_SL=tokens, sampled_SL=exact, trained_SL=trained, about={"vllm": "0"})

    monkeypatch.setattr(mismatch, "create_random_model", lambda *_, **__: small_model())
    monkeypatch.setattr(mismatch_with_vllm, "check_installed", lambda python: None)
    monkeypatch.setattr(mismatch_with_vllm, "run", peer)
    figures = mismatch.run("qwen2-0.5b", against="vllm", workload=WORKLOAD, device="cpu")
    gaps = figures["gaps"]
    assert set(gaps) == set(LABELS)
    assert gaps["vllm_trl_bfloat16"]["mean"] == pytest.approx(0.75, abs=1e-5)
    assert gaps["vllm_trl_float32"]["mean"] == pytest.approx(0.5, abs=1e-5)
    assert gaps["vllm_error"]["max"] < 1e-3
    assert gaps["trl_bfloat16_error"]["mean"] == pytest.approx(0.75, abs=1e-3)
    assert 0 < gaps["same_tokens"]["mean"] < 0.1
    assert figures["ratio_same_tokens"] == pytest.approx(0.5 / gaps["same_tokens"]["mean"], rel=1e-4)
    assert figures["ratio_own_tokens"] == pytest.approx(0.5 / gaps["mismatch"]["mean"], rel=1e-4)
    console = Console(width=160)
    with console.capture() as captured:
        console.print(mismatch.table(figures))
    said = " ".join(captured.get().split())
    assert f"over ours: {figures['ratio_same_tokens']:.2f} on the same tokens" in said
    json.dumps(figures)


def test_a_gap_takes_the_percentile_the_trainer_takes_and_leaves_out_what_is_unknown() -> None:
    values = np.arange(1, 201, dtype=np.float32)
    assert gap(values, np.zeros(200)) == {"mean": 100.5, "p99": 198.0, "max": 200.0, "num_tokens": 200}
    assert gap(np.array([1.0, math.nan]), np.zeros(2))["num_tokens"] == 1
    with pytest.raises(ConfigError, match="no log-probabilities"):
        gap(np.array([math.nan]), np.zeros(1))


def test_prompts_repeat_within_a_group_and_follow_the_seed() -> None:
    prompts = WORKLOAD.prompts(VOCAB)
    assert prompts.shape == (6, 9)
    assert (prompts[0::2] == prompts[1::2]).all() and (prompts[0] != prompts[2]).any()
    assert (replace(WORKLOAD, seed=1).prompts(VOCAB) != prompts).any()


def test_only_vllm_can_be_run_beside() -> None:
    with pytest.raises(ConfigError, match="only vllm"):
        mismatch.run("qwen2-0.5b", against="sglang", device="cpu")
