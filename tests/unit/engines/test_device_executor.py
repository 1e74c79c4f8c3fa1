"""The device path, uncompiled and with plain torch in place of kernels, against the CPU's executor."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headrace.engines import device_passes, device_setup, prompt_batches
from headrace.engines.decode_batches import DecodeBatch, bucket_sizes, quickest
from headrace.engines.device_executor import DeviceExecutor
from headrace.engines.device_kernels import TorchKernels
from headrace.engines.device_model import LayerShape
from headrace.engines.device_passes import DevicePasses
from headrace.engines.device_state import DeviceState
from headrace.engines.torch_engine import TorchEngine
from headrace.errors import ConfigError
from headrace.kernels import dealing
from headrace.kernels.dealing import spans_of_rows
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.tensors import to_blobs
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger

LENGTHS = (3, 40, 17, 90, 1, 33, 65, 12)


@pytest.fixture
def make_executor(tiny_checkpoint):
    def build(checkpoint=tiny_checkpoint, **settings):
        given = {"max_running": 12, "block_size": 16, "kv_tokens": 2048, "prefill_tokens": 512, **settings}
        return DeviceExecutor(load_model(checkpoint), compiled=False, **given)

    return build


def engine_of(executor, prefill_tokens=512):
    return TorchEngine(executor, ledger=TimeLedger(ENGINE_ACTIVITIES), prefill_tokens=prefill_tokens)


@pytest.fixture
def crowd(make_request):
    return [
        make_request(f"r{i}", prompt=n, max_tokens=15 + 9 * i, stop_ids=(7, 13))
        for i, n in enumerate(LENGTHS)
    ]


def agree(a, b):
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    np.testing.assert_array_equal(a.kv_versions, b.kv_versions)
    assert a.finish_reason == b.finish_reason


@pytest.mark.parametrize(
    "settings",
    [{}, {"prefill_tokens": 7}, {"max_running": 3}, {"kv_tokens": 176}],
    ids=["plain", "small chunks", "few slots", "preempted"],
)
def test_tokens_are_those_of_the_plain_executor(make_engine, make_device_engine, run_engine, crowd, settings):
    expected = run_engine(make_engine(), *crowd)
    engine = make_device_engine(**settings)
    got = run_engine(engine, *crowd)
    for name, completion in expected.items():
        agree(got[name], completion)
    assert (engine.counters()["preemptions"] > 0) == ("kv_tokens" in settings)


def test_passes_larger_than_every_bucket_are_computed_too(
    make_engine, make_device_engine, run_engine, crowd, monkeypatch
):
    expected = run_engine(make_engine(), *crowd)
    monkeypatch.setattr(prompt_batches, "_MOST_ROWS", 40)
    monkeypatch.setattr(prompt_batches, "_MOST_PIECES", 2)
    engine = make_device_engine()
    executor, sizes = engine._executor, []
    prefill = executor._passes.prefill
    executor._passes.prefill = lambda layout, wanted: (
        sizes.append(layout.num_rows),
        prefill(layout, wanted),
    )[1]
    got = run_engine(engine, *crowd)
    assert max(sizes) > 40
    for name, completion in expected.items():
        agree(got[name], completion)


def test_what_a_pass_draws_comes_to_the_host_in_one_copy(
    make_executor, make_request, run_engine, monkeypatch
):
    copies, to_host = [], device_passes.to_host
    monkeypatch.setattr(device_passes, "to_host", lambda drawn: (copies.append(drawn), to_host(drawn))[1])
    engine = engine_of(make_executor())
    run_engine(engine, *(make_request(f"r{i}", prompt=5, max_tokens=8) for i in range(3)))
    # One pass that ends the prompts, then one for each token more.
    assert len(copies) == 8
    assert all(drawn.is_contiguous() for drawn in copies)


def test_little_room_is_told(make_executor):
    lines = []
    executor = make_executor(kv_tokens=64, progress=lines.append)
    assert executor.limit_tokens == 64
    assert any("room for sequences of 64 tokens" in line for line in lines)


def test_memory_that_is_not_there_names_its_setting(make_executor, monkeypatch):
    made = []

    def state(*args, num_blocks, **kwargs):
        made.append(num_blocks)
        if len(made) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return DeviceState(*args, num_blocks=num_blocks, **kwargs)

    monkeypatch.setattr(device_setup, "DeviceState", state)
    with pytest.raises(ConfigError, match=r"engine\.kv_tokens: keys and values of 2,048 tokens take .* GiB"):
        make_executor()


def test_a_group_computes_its_prompt_once(make_device_engine, run_engine, make_request):
    group = [make_request(f"g{i}", prompt=np.arange(50) % 61, seed=i) for i in range(6)]
    engine = make_device_engine()
    run_engine(engine, *group)
    assert engine.counters()["cache_hit_tokens"] == 5 * 48


def test_a_prompt_that_fills_its_blocks_is_computed_once_but_for_its_last_token(
    make_device_engine, make_engine, run_engine, make_request
):
    group = [make_request(f"g{i}", prompt=np.arange(48) % 61, seed=i, max_tokens=20) for i in range(6)]
    engine = make_device_engine()
    together, plain = run_engine(engine, *group), run_engine(make_engine(), *group)
    assert engine.counters()["prefill_tokens"] == 48 + 5
    for name, expected in plain.items():
        np.testing.assert_array_equal(together[name].token_ids, expected.token_ids)
        np.testing.assert_allclose(together[name].logprobs, expected.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_running": 7}, {"kv_tokens": 240}, {"prefill_tokens": 20}],
    ids=["plain", "slots change hands", "preempted", "members start one by one"],
)
def test_members_that_read_their_prompt_together_draw_as_if_alone(
    make_engine, make_executor, run_engine, make_request, settings
):
    """Members finish at different times; their prompts are 40 to 70 tokens, of which full blocks are shared."""
    prompts = [np.random.default_rng(n).integers(0, 61, n) for n in (40, 64, 70)]
    members = [
        make_request(f"g{n}m{i}", prompt=prompt, max_tokens=6 + 5 * i, stop_ids=(7,))
        for n, prompt in enumerate(prompts)
        for i in range(5)
    ]
    expected = run_engine(make_engine(), *members)
    executor = make_executor(**settings)
    engine = engine_of(executor, settings.get("prefill_tokens", 512))
    got = run_engine(engine, *members)
    for name, completion in expected.items():
        agree(got[name], completion)
    assert executor.num_tokens_shared > 1000
    assert (engine.counters()["preemptions"] > 0) == ("kv_tokens" in settings)


def test_passes_are_told_what_each_row_is_split_into(
    make_executor, run_engine, make_request, crowd, monkeypatch
):
    """By the key-value rows it reads itself, a shared prompt not counted; padding has one span too."""
    seen = set()

    def looking(passes, batch):
        own = batch.lengths - (0 if batch.shared is None else batch.shared.begins)
        at_once = spans_at_once(None, batch.size, sharing=batch.shared is not None)
        expected = spans_of_rows(own.numpy(), at_once, torch.device("cpu"))
        for told, right in zip(batch.spans, expected, strict=True):
            assert torch.equal(told, right)
        seen.add((batch.shared is None, int(batch.spans.firsts[-1]) > batch.size))
        return decode(passes, batch)

    def spans_at_once(_, num_rows, *given, sharing):
        return num_rows * (2 + sharing)

    decode = DevicePasses.decode
    monkeypatch.setattr(DevicePasses, "decode", looking)
    monkeypatch.setattr(dealing, "MIN_SPAN", 16)
    monkeypatch.setattr(TorchKernels, "spans_at_once", spans_at_once)
    group = [make_request(f"g{i}", prompt=np.arange(50) % 61, max_tokens=6 + 5 * i, seed=i) for i in range(4)]
    run_engine(engine_of(make_executor()), *crowd, *group)
    assert {shared for shared, is_split in seen if is_split} == {True, False}


@pytest.mark.parametrize("size", [2, 5, 64])
def test_a_batch_that_was_not_filled_is_a_pass_of_padding(size):
    """It is captured so, and its spans are divided by."""
    batch = DecodeBatch(size, torch.device("cpu"), num_at_once=7)
    expected = spans_of_rows(np.zeros(size), 7, torch.device("cpu"))
    assert all(torch.equal(told, right) for told, right in zip(batch.spans, expected, strict=True))
    assert not batch.lengths.any() and (batch.temperatures == 1.0).all()


def test_rows_with_nothing_in_common_share_nothing(make_executor, run_engine, crowd):
    executor = make_executor()
    run_engine(engine_of(executor), *crowd)
    assert executor.num_tokens_shared == 0


def test_a_pass_over_the_middle_of_a_prompt_draws_nothing(
    make_engine, make_device_engine, run_engine, make_request
):
    request = make_request("long", prompt=70)
    got = run_engine(make_device_engine(prefill_tokens=20), request)["long"]
    agree(got, run_engine(make_engine(), request)["long"])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3"])
def test_families_agree_with_the_plain_executor(
    tmp_path, make_device_engine, run_engine, make_request, family
):
    from headrace.engines.make import torch_engine

    make_tiny_model(
        tmp_path, family=family, vocab_size=61, num_kv_heads=2, init_std=0.12, tie_embeddings=False
    )
    crowd = [make_request(f"f{i}", prompt=n, max_tokens=12) for i, n in enumerate((5, 60, 33))]
    crowd.append(make_request("f3", prompt=crowd[1].prompt_ids, max_tokens=20))
    plain = torch_engine(load_model(tmp_path), ledger=TimeLedger(ENGINE_ACTIVITIES))
    expected, got = run_engine(plain, *crowd), run_engine(make_device_engine(tmp_path), *crowd)
    for name, completion in expected.items():
        agree(got[name], completion)


def test_scores_and_new_weights(make_engine, make_device_engine, tmp_path):
    other = make_tiny_model(
        tmp_path, vocab_size=61, init_std=0.12, tie_embeddings=False, context_tokens=256, seed=1
    )
    ids = [np.random.default_rng(n).integers(0, 61, n) for n in (2, 30, 70)]
    engines = [make_engine(), make_device_engine(prefill_tokens=16)]
    for version in (0, 1):
        plain, device = (engine.score(ids, 0.8) for engine in engines)
        for a, b in zip(plain, device, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
        for engine in engines:
            engine.apply(version + 1, list(to_blobs(other)))


def test_layers_are_one_compiled_piece_of_code(tiny_checkpoint):
    """The attention operation neither breaks the graph nor tells layers apart."""
    from torch._dynamo.testing import CompileCounter

    from headrace.engines.device_model import DeviceModel, _Probe

    torch._dynamo.reset()
    model = DeviceModel(load_model(tiny_checkpoint), compiled=False)
    counter = CompileCounter()
    for layer in model._model.base_model.layers:
        layer.compile(backend=counter, dynamic=True, fullgraph=True)
    for num_rows in (9, 5, 33):
        ids = torch.arange(num_rows)
        model.logits(ids, ids, _Probe(len(model.layers)))
    assert counter.frame_count == 1


def test_buckets_reach_the_most_and_waste_at_most_a_third():
    for most in (1, 2, 3, 17, 64, 100, 512):
        sizes = bucket_sizes(most)
        assert sizes[-1] == max(2, most) and sizes == sorted(set(sizes))
        assert all(b <= max(2 * a, 16) and (a < 16 or b <= 1.5 * a) for a, b in pairwise(sizes))


@pytest.mark.parametrize(
    ("seconds", "used"),
    [
        ([1.0], [0]),
        ([1.0, 2.0, 3.0], [0, 1, 2]),
        ([1.0, 3.0, 2.0, 4.0], [0, 2, 2, 3]),
        ([5.0, 4.0, 3.0, 2.0], [3, 3, 3, 3]),
        ([1.0, 5.0, 4.0, 3.0, 9.0], [0, 3, 3, 3, 4]),
        ([2.0, 1.99], [0, 1]),
    ],
    ids=["one", "rising", "one too slow", "falling", "several", "within the noise"],
)
def test_a_bucket_gives_way_to_a_larger_one_that_is_clearly_quicker(seconds, used):
    assert quickest(seconds) == used


def test_memory_of_the_kernels_serves_every_layer(monkeypatch):
    """A layer may have the most heads and another the widest."""
    monkeypatch.setattr(device_setup, "TritonKernels", lambda **given: given)
    layers = [LayerShape(8, 2, 128, 512), LayerShape(16, 4, 128, 128)]
    given = device_setup._kernels(SimpleNamespace(layers=layers), 12, 4096, torch.device("cuda"))
    assert (given["num_heads"], given["value_dim"]) == (16, 512)
