"""The whole engine over its real kernels against the CPU's, which has none of them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from headrace.engines.device_executor import DeviceExecutor
from headrace.engines.device_kernels import TritonKernels
from headrace.engines.make import torch_engine
from headrace.engines.torch_engine import TorchEngine
from headrace.models.float_residual import keep_float_residual
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.lora import LoraSpec, target_linears
from headrace.models.tensors import blobs_of, named_tensors
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import Request, Sampling

# Divisions by zero of lanes that are masked, which numpy computes all the same.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VOCAB = 61


def tiny(directory, family="qwen2", seed=0, **shape):
    given = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "num_layers": 1, "context_tokens": 256}
    given |= {"vocab_size": VOCAB, "init_std": 0.12, "tie_embeddings": False, **shape}
    make_tiny_model(directory, family=family, seed=seed, **given)
    return load_model(directory)


def plain(model):
    return torch_engine(copy.deepcopy(model), ledger=TimeLedger(ENGINE_ACTIVITIES))


def with_kernels(model, *, recompute_kv=False, **settings):
    model = copy.deepcopy(model)
    keep_float_residual(model)
    given = {"max_running": 8, "block_size": 16, "kv_tokens": 1024, "prefill_tokens": 128, **settings}
    executor = DeviceExecutor(model, compiled=False, **given)
    assert isinstance(executor._passes._kernels, TritonKernels)
    return TorchEngine(
        executor, ledger=TimeLedger(ENGINE_ACTIVITIES), prefill_tokens=128, recompute_kv=recompute_kv
    )


def crowd(prompts=(5, 40, 17), max_tokens=4, **sampling):
    rng = np.random.default_rng(3)
    return [
        Request(
            id=f"r{i}",
            prompt_ids=rng.integers(0, VOCAB, n).astype(np.int32),
            sampling=Sampling(max_tokens=max_tokens + i, **sampling),
            seed=i,
        )
        for i, n in enumerate(prompts)
    ]


def generate(engine, requests, between=lambda: None):
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.has_work:
        done.update(engine.step())
        between()
    return done


def whole(request, completion):
    return np.concatenate((request.prompt_ids, completion.token_ids)).astype(np.int64)


def scores(engine, request, completion, **policy):
    return engine.score([whole(request, completion)], 1.0, **policy)[0][len(request.prompt_ids) :]


def assert_same(done, expected):
    for name, completion in expected.items():
        np.testing.assert_array_equal(done[name].token_ids, completion.token_ids)
        np.testing.assert_allclose(done[name].logprobs, completion.logprobs, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2"])
def test_tokens_are_those_of_the_cpu(tmp_path, family):
    """Plain heads, heads with norms of their own, and windows with capped scores."""
    model = tiny(tmp_path, family, num_layers=2 if family == "gemma2" else 1)
    requests = crowd()
    assert_same(generate(with_kernels(model), requests), generate(plain(model), requests))


@pytest.mark.parametrize("length", [40, 48])
def test_members_that_read_their_prompt_together(tmp_path, monkeypatch, length):
    """Rows of several spans, some behind a prompt that is read once, also one that fills its blocks, some with nothing
    to share."""
    from headrace.kernels import dealing

    monkeypatch.setattr(TritonKernels, "sharing_pays_bytes", 1)
    monkeypatch.setattr(dealing, "MIN_SPAN", 8)
    model, requests = tiny(tmp_path), crowd(prompts=(90,), max_tokens=3)
    prompt = np.random.default_rng(5).integers(0, VOCAB, length).astype(np.int32)
    requests += [
        Request(id=f"m{i}", prompt_ids=prompt, sampling=Sampling(max_tokens=2 + i), seed=i) for i in range(3)
    ]
    engine = with_kernels(model)
    assert_same(generate(engine, requests), generate(plain(model), requests))
    assert engine._executor.num_tokens_shared > 0
    assert engine.counters()["prefill_tokens"] == 90 + (40 + 2 * 8 if length == 40 else 48 + 2)


def test_truncated_rows_keep_what_the_cpu_keeps(tmp_path):
    model = tiny(tmp_path)
    requests = crowd(prompts=(5, 9), max_tokens=3, top_k=20, top_p=0.8, min_p=0.01)
    done, expected = (generate(engine, requests) for engine in (with_kernels(model), plain(model)))
    assert_same(done, expected)
    for name, completion in expected.items():
        for field in ("token_ids", "offsets"):
            ours, right = (getattr(c.sampling_mask, field) for c in (done[name], completion))
            np.testing.assert_array_equal(ours, right)


def test_a_bfloat16_model_is_computed_by_the_kernels_made_for_it(tmp_path, as_hopper, counted, monkeypatch):
    """Gated layers, products added to the running sum, attention and draws, as on an H200."""
    from headrace.kernels import added_product, gated

    monkeypatch.setattr(added_product, "_LEAST_OUTPUTS", 1)
    calls = counted(added_product, "add_product")
    counted(gated, "tiled_product", "by_torch")
    model, requests = tiny(tmp_path).bfloat16(), crowd()
    engine = with_kernels(model)
    calls.clear()
    done = generate(engine, requests)
    reference = plain(model.float())
    errors = [np.abs(scores(reference, r, done[r.id]) - done[r.id].logprobs) for r in requests]
    assert max(error.max() for error in errors) < 0.03 and np.concatenate(errors).mean() < 0.006
    # A pass is one layer here: a gated product, and two that are added unless its rows are more than the kernel takes.
    passes = engine.counters()["passes"] + engine.counters()["prompt_passes"] - 1
    assert calls["tiled_product"] == passes and calls["by_torch"] == 0
    assert calls["add_product"] == 2 * (passes - 1)


def test_no_pass_sees_mixed_weights(tmp_path):
    """Weights land by the kernel that copies them all; keys and values are computed anew after each update."""
    models = [tiny(tmp_path / str(seed), seed=seed) for seed in range(2)]
    bundles = [on_device(named_tensors(model)) for model in models]
    engine, requests, version = with_kernels(models[0], recompute_kv=True), crowd(prompts=(5, 20)), 0

    def update():
        nonlocal version
        version += 1
        engine.apply(version, bundles[version % 2])

    done = generate(engine, requests, between=update)
    references = [plain(model) for model in models]
    for request in requests:
        completion = done[request.id]
        assert len(set(completion.versions.tolist())) > 2
        by_model = [scores(reference, request, completion) for reference in references]
        expected = np.where(completion.versions % 2 == 0, *by_model)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


def test_adapters_land_and_serve_their_own_rows(tmp_path):
    model, spec = tiny(tmp_path), LoraSpec(rank=4, alpha=8.0, targets=("all-linear",))
    adapters = [random_adapter(model, spec, seed) for seed in (1, 2)]
    engine = with_kernels(model, lora=spec, num_adapters=2)
    for number, tensors in enumerate(adapters):
        engine.apply_adapter(f"p{number}", 1, on_device(tensors))
    requests = [
        Request(id=r.id, prompt_ids=r.prompt_ids, sampling=r.sampling, seed=r.seed, policy=f"p{i % 2}")
        for i, r in enumerate(crowd())
    ]
    done = generate(engine, requests)
    references = [plain(merged(model, tensors)) for tensors in adapters]
    for i, request in enumerate(requests):
        expected = scores(references[i % 2], request, done[request.id])
        np.testing.assert_allclose(done[request.id].logprobs, expected, atol=5e-5)


def test_a_pool_under_pressure_loses_nothing(tmp_path):
    model, requests = tiny(tmp_path), crowd(prompts=(14, 13, 12), max_tokens=20)
    engine = with_kernels(model, kv_tokens=80)
    assert_same(generate(engine, requests), generate(plain(model), requests))
    assert engine.counters()["preemptions"] > 0 and engine.counters()["free_blocks"] == 5


def on_device(tensors):
    """Blobs whose bytes lie where the engine computes, as they come from a sender on the same GPU."""
    return [
        type(blob)(
            name=blob.name, dtype=blob.dtype, shape=blob.shape, data=torch.from_numpy(blob.data.copy())
        )
        for blob in blobs_of({name: tensor.detach() for name, tensor in tensors.items()})
    ]


def random_adapter(model, spec, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {"scaling": torch.tensor([spec.alpha / spec.rank])}
    for name in target_linears(model, spec.targets):
        num_out, num_in = model.get_submodule(name).weight.shape
        tensors[f"{name}.lora_A.weight"] = 0.2 * torch.randn((spec.rank, num_in), generator=generator)
        tensors[f"{name}.lora_B.weight"] = 0.2 * torch.randn((num_out, spec.rank), generator=generator)
    return tensors


def merged(model, tensors):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name in [key.removesuffix(".lora_A.weight") for key in tensors if key.endswith("lora_A.weight")]:
            a, b = (tensors[f"{name}.lora_{x}.weight"] for x in "AB")
            model.get_submodule(name).weight += tensors["scaling"] * (b @ a)
    return model
