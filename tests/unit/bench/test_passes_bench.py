"""The engine's passes taken apart: what is timed are decode passes of the rows that were asked for."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from headrace.bench import passes
from headrace.bench.passes import Kind, by_kernel, bytes_of, kind_of, measure
from headrace.bench.shapes import build_random_model, shape_config
from headrace.engines.make import torch_engine
from headrace.errors import ConfigError
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger


def small_model():
    config = shape_config("qwen2-0.5b")
    config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size = 1, 64, 96, 50
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    return build_random_model(config, device="cpu", dtype=torch.float32)


def test_timed_passes_decode_all_rows_and_nothing_else():
    engine = torch_engine(small_model(), ledger=TimeLedger(ENGINE_ACTIVITIES), max_running=32)
    before = 0.0
    for kind in (Kind(16, 5), Kind(9, 40)):
        found = measure(engine, kind, 50, timed=4, profiled=3)
        counters = engine.counters()
        # Both groups of eight share their prompts, and the ninth row has one for itself.
        assert counters["prefill_tokens"] - before == 2 * passes.PROMPT_TOKENS + kind.rows * kind.own_tokens
        before = counters["prefill_tokens"]
        assert found["rows"] == kind.rows and found["pass_s"] > 0.0
        # A token for each row of the warm passes, and in the middle of the timed ones; the last has not landed.
        assert kind.own_tokens + 5 + 2 <= found["own_tokens_timed"] <= kind.own_tokens + 12
        assert not engine.has_work and counters["running"] == counters["waiting"] == 0


def test_rows_there_is_no_room_for_are_an_error_and_not_an_endless_wait(monkeypatch):
    monkeypatch.setattr(passes, "_MOST_PROMPT_PASSES", 20)
    engine = torch_engine(small_model(), ledger=TimeLedger(ENGINE_ACTIVITIES), max_running=4)
    with pytest.raises(ConfigError, match="--rows 6x5: of 6 rows 4 decode"):
        measure(engine, Kind(6, 5), 50)


def test_rows_that_end_while_they_are_timed_are_an_error():
    model = small_model()
    model.config.max_position_embeddings = passes.PROMPT_TOKENS + 20
    engine = torch_engine(model, ledger=TimeLedger(ENGINE_ACTIVITIES), max_running=8)
    with pytest.raises(ConfigError, match="not all decoded in 30 passes"):
        measure(engine, Kind(8, 5), 50)


def test_rows_that_are_sent_back_for_want_of_room_are_an_error():
    engine = torch_engine(
        small_model(),
        ledger=TimeLedger(ENGINE_ACTIVITIES),
        max_running=4,
        kv_tokens=passes.PROMPT_TOKENS + 4 * 64,
    )
    with pytest.raises(ConfigError, match="of 4 rows"):
        measure(engine, Kind(4, 40), 50)


def test_every_kind_is_run_and_held_against_its_bytes(monkeypatch):
    monkeypatch.setattr(passes, "create_random_model", lambda shape: small_model())
    monkeypatch.setattr(passes, "copy_bandwidth", lambda: 1e6)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    figures = passes.run("qwen2-0.5b", kinds=[Kind(3, 5), Kind(9, 2)])
    assert figures["shape"] == "qwen2-0.5b" and [kind["rows"] for kind in figures["kinds"]] == [3, 9]
    for kind in figures["kinds"]:
        assert kind["limit_s"] == bytes_of(small_model(), kind["rows"], kind["own_tokens_timed"]) / 1e6
        assert kind["fraction_of_limit"] == pytest.approx(kind["limit_s"] / kind["pass_s"])


def test_launches_of_one_kernel_are_added_up_and_the_longest_comes_first():
    launches = [("norm", 2.0), ("product", 50.0), ("norm", 3.0), ("product", 40.0), ("copy", 1.0)]
    assert by_kernel(launches, 2) == [
        {"kernel": "product", "launches": 1.0, "us": 45.0},
        {"kernel": "norm", "launches": 1.0, "us": 2.5},
        {"kernel": "copy", "launches": 0.5, "us": 0.5},
    ]


def test_a_pass_must_read_weights_prompts_once_a_group_and_its_own_rows():
    weights = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 64 * 50
    rows = 2 * passes.PROMPT_TOKENS + 12 * 7
    assert bytes_of(small_model(), 12, 7) == 2 * weights + rows * 2 * 2 * 16 * 2


def test_kinds_are_read_from_text():
    assert kind_of("24x1500") == Kind(24, 1500)
    for wrong in ("24", "x5", "0x5", "3x0", "3x-1", "axb"):
        with pytest.raises(ConfigError, match="24x1500"):
            kind_of(wrong)


def test_every_kind_has_a_table_of_its_own():
    kernels = [
        {"kernel": "a" * 80, "launches": 28.0, "us": 900.0},
        {"kernel": "b", "launches": 1.0, "us": 100.0},
    ]
    kind = {"rows": 24, "own_tokens": 1500, "pass_s": 2e-3, "fraction_of_limit": 0.5, "kernels": kernels}
    console = Console(width=140, file=io.StringIO())
    console.print(passes.table({"shape": "qwen2-7b", "device": "a GPU", "kinds": [kind]}))
    shown = console.file.getvalue()
    assert "24 rows with 1,500 tokens each" in shown and "2.00 ms a pass, 1.00 ms of kernels, 50%" in shown
    assert "90.0%" in shown and "a" * 61 not in shown
