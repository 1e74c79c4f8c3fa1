"""The engine on a GPU, compiled and captured, against the float32 engine on the CPU."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.engines.device_executor import DeviceExecutor
from headrace.engines.make import torch_engine
from headrace.engines.pieces import Piece, lay_out
from headrace.engines.sampler import SamplerRows, sample
from headrace.engines.truncated_draws import LISTED_TOKENS
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.tensors import to_blobs
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import Request, Sampling

# Compilers warn of what they could do better, which is no error of ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

VOCAB = 199
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
MEAN_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}


def build(model, **settings):
    return torch_engine(model, ledger=TimeLedger(ENGINE_ACTIVITIES), **settings)


def tiny(directory, family="qwen2", seed=0, **shape):
    given = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "context_tokens": 512, **shape}
    given = {"vocab_size": VOCAB, "init_std": 0.08, **given}
    make_tiny_model(directory, family=family, tie_embeddings=False, seed=seed, **given)
    return load_model(directory)


def on_gpu(model, dtype):
    return copy.deepcopy(model).to(device="cuda", dtype=dtype)


def crowd(count=12, max_tokens=40, **sampling):
    rng = np.random.default_rng(3)
    return [
        Request(
            id=f"r{i}",
            prompt_ids=rng.integers(0, VOCAB, 5 + 13 * (i % 9)).astype(np.int32),
            sampling=Sampling(max_tokens=max_tokens + i, stop_ids=(7,), **sampling),
            seed=i,
        )
        for i in range(count)
    ]


def generate(engine, requests):
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.has_work:
        done.update(engine.step())
    return done


def whole(request, completion):
    return np.concatenate((request.prompt_ids, completion.token_ids)).astype(np.int64)


def assert_scored_alike(reference, requests, done, dtype, *, reference_has_experts=False):
    errors = []
    for request in requests:
        completion = done[request.id]
        (scored,) = reference.score([whole(request, completion)], request.sampling.temperature)
        errors.append(np.abs(scored[len(request.prompt_ids) :] - completion.logprobs))
    errors = np.sort(np.concatenate(errors))
    # Where two experts score alike to bfloat16, rounding decides which is used, and the token has another answer.
    routed = reference_has_experts and dtype == torch.bfloat16
    bulk = errors[: int(0.98 * len(errors))] if routed else errors
    assert bulk.max() < TOLERANCE[dtype] and errors.mean() < MEAN_TOLERANCE[dtype], errors.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3_moe"])
def test_logprobs_are_those_of_the_reference(tmp_path, family, dtype):
    model = tiny(tmp_path, family)
    rounded = copy.deepcopy(model).to(dtype).float()
    engine = build(on_gpu(model, dtype), max_running=16, kv_tokens=8192)
    requests = crowd(temperature=0.9)
    done = generate(engine, requests)
    assert_scored_alike(build(rounded), requests, done, dtype, reference_has_experts=family == "qwen3_moe")


def test_gated_layers_are_computed_by_their_kernels(tmp_path, monkeypatch):
    """Of a bfloat16 model, for few rows and for many."""
    from headrace.kernels import gated, gated_library

    rows = []

    def counting(real):
        def counted(x, *given, **chosen):
            rows.append(len(x))
            return real(x, *given, **chosen)

        return counted

    monkeypatch.setattr(gated, "tiled_product", counting(gated.tiled_product))
    monkeypatch.setattr(gated_library, "library_product", counting(gated_library.library_product))
    engine = build(on_gpu(tiny(tmp_path), torch.bfloat16), max_running=16, kv_tokens=8192, compiled=False)
    rows.clear()
    generate(engine, crowd(max_tokens=4))
    assert min(rows) <= 16 and max(rows) >= 288


def test_float32_tokens_are_those_of_the_cpu(tmp_path):
    model = tiny(tmp_path)
    requests = crowd()
    ours = generate(build(on_gpu(model, torch.float32), max_running=16, kv_tokens=8192), requests)
    expected = generate(build(model), requests)
    same = sum(np.array_equal(ours[r.id].token_ids, expected[r.id].token_ids) for r in requests)
    # The noise is the same to the bit; a draw differs only where two tokens tie to rounding.
    assert same >= len(requests) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_groups_that_read_their_prompt_once(tmp_path, monkeypatch, family, dtype):
    """However little it saves, prompts are shared here, in graphs and with members that come and go; two prompts fill
    their blocks."""
    from headrace.engines.device_kernels import TritonKernels
    from headrace.engines.torch_engine import TorchEngine

    monkeypatch.setattr(TritonKernels, "sharing_pays_bytes", 1)
    model = tiny(tmp_path, family)
    executor = DeviceExecutor(
        on_gpu(model, dtype), max_running=24, block_size=16, kv_tokens=8192, prefill_tokens=512
    )
    engine = TorchEngine(executor, ledger=TimeLedger(ENGINE_ACTIVITIES), prefill_tokens=512)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in (50, 130, 304, 64)]
    requests = [
        Request(id=f"g{g}m{i}", prompt_ids=prompt, sampling=Sampling(max_tokens=20 + 9 * i), seed=100 * g + i)
        for g, prompt in enumerate(prompts)
        for i in range(11)
    ]
    done = generate(engine, requests)
    assert executor.num_tokens_shared > 0
    rounded = copy.deepcopy(model).to(dtype).float()
    assert_scored_alike(build(rounded), requests, done, dtype)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_moe"])
def test_replayed_prompts_are_those_launched_kernel_by_kernel(tmp_path, family):
    """Buckets of several sizes, smaller after larger and the other way, and pieces that begin within a sequence."""
    model = on_gpu(tiny(tmp_path, family), torch.bfloat16)
    executor = DeviceExecutor(model, max_running=24, block_size=16, kv_tokens=8192, prefill_tokens=512)
    rng = np.random.default_rng(1)
    for counts in [(3,), (50, 70, 1), (200, 100), (9, 8, 7, 6, 5), (256, 256), (1,) * 20]:
        pieces = []
        for slot, count in enumerate(counts):
            blocks = 1 + 20 * slot + rng.permutation(20)
            pieces.append(Piece(slot, slot % 3, rng.integers(0, VOCAB, count), blocks))
        layout = lay_out(pieces, 16)
        wanted = layout.last_rows(range(len(counts)))
        executor._passes.bring_tables(layout)
        for pool in executor._passes.state.pools:
            # What both must write themselves; what precedes a piece is nobody's, and the same for both.
            pool[1:].fill_(0.5)
        launched = executor._passes.prefill(layout, wanted).clone()
        pools = [pool[1:].clone() for pool in executor._passes.state.pools]
        for pool in executor._passes.state.pools:
            pool[1:].fill_(0.5)
        for _ in range(2):
            assert executor._prompts.run(layout, wanted)
        replayed = executor._passes.logits[: len(counts)]
        assert (replayed - launched).norm() < 0.02 * launched.norm()
        for pool, expected in zip(executor._passes.state.pools, pools, strict=True):
            assert (pool[1:] - expected).norm() < 0.02 * expected.norm()


def test_a_pool_under_pressure_loses_nothing(tmp_path):
    model = tiny(tmp_path)
    engine = build(on_gpu(model, torch.float32), max_running=16, kv_tokens=640)
    requests = crowd(count=30, max_tokens=90)
    done = generate(engine, requests)
    counters = engine.counters()
    assert counters["preemptions"] > 0 and counters["free_blocks"] == 640 // 16
    assert_scored_alike(build(model), requests, done, torch.float32)


def compare_kept_sets(model, requests, done, dtype):
    """Each token is in its set, with the reference's log-probability within that set. Returns the share of the
    reference's kept ids that differ, and the sizes of the sets."""
    differing, expected_sizes, sizes, errors = 0, 0, [], []
    for request in requests:
        completion, sampling = done[request.id], request.sampling
        mask, count = completion.sampling_mask, completion.num_tokens
        assert len(mask.offsets) == count + 1
        with torch.inference_mode():
            ids = torch.from_numpy(whole(request, completion))[None]
            logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = sample(logits, settings_of(sampling, count)).kept
        logprobs = torch.log_softmax(logits / sampling.temperature, dim=-1)
        for i, token in enumerate(completion.token_ids.tolist()):
            kept = mask.token_ids[mask.offsets[i] : mask.offsets[i + 1]]
            assert token in kept and (np.diff(kept) > 0).all()
            within = logprobs[i, token] - logprobs[i, torch.from_numpy(kept).long()].logsumexp(dim=0)
            errors.append(abs(float(within) - float(completion.logprobs[i])))
            differing += len(np.setxor1d(kept, expected[i]))
            expected_sizes += len(expected[i])
            sizes.append(len(kept))
    assert max(errors) < TOLERANCE[dtype] and np.mean(errors) < MEAN_TOLERANCE[dtype], max(errors)
    return differing / expected_sizes, sizes


def settings_of(sampling, count):
    """Kept sets depend on no seed and no position."""
    return SamplerRows(
        temperature=np.full(count, sampling.temperature, dtype=np.float32),
        top_k=np.full(count, sampling.top_k, dtype=np.int64),
        top_p=np.full(count, sampling.top_p, dtype=np.float32),
        min_p=np.full(count, sampling.min_p, dtype=np.float32),
        seed_key=np.zeros(count, dtype=np.uint64),
        position=np.zeros(count, dtype=np.int64),
    )


# In float32 a cut differs only where the mass above it rounds to the other side; in bfloat16 neighbours swap.
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.002), (torch.bfloat16, 0.1)])
def test_truncated_rows_keep_what_the_reference_keeps(tmp_path, dtype, share):
    model = tiny(tmp_path)
    rounded = copy.deepcopy(model).to(dtype).float()
    engine = build(on_gpu(model, dtype), max_running=24, kv_tokens=8192)
    kinds = [{"top_k": 11, "top_p": 0.8}, {"top_p": 0.9}, {"min_p": 0.1, "temperature": 0.7}, {}]
    requests = [
        replace(request, id=f"{request.id}/{n}", sampling=replace(request.sampling, **kind))
        for n, kind in enumerate(kinds)
        for request in crowd(count=6)
    ]
    done = generate(engine, requests)
    truncated = [request for request in requests if request.sampling.truncates]
    differing, _ = compare_kept_sets(rounded, truncated, done, dtype)
    assert differing < share
    plain = [request for request in requests if not request.sampling.truncates]
    assert_scored_alike(build(rounded), plain, done, dtype)


def test_sets_that_outgrow_their_list_are_whole(tmp_path):
    model = tiny(tmp_path, vocab_size=5000, init_std=0.02)
    engine = build(on_gpu(model, torch.float32), max_running=8, kv_tokens=4096)
    requests = crowd(count=6, max_tokens=10, top_p=0.9, temperature=1.5)
    differing, sizes = compare_kept_sets(model, requests, generate(engine, requests), torch.float32)
    assert min(sizes) > LISTED_TOKENS and differing < 0.002


def test_truncated_passes_are_launched_without_a_wait(tmp_path):
    engine = build(on_gpu(tiny(tmp_path), torch.float32), max_running=8, kv_tokens=4096)
    requests = crowd(count=6, top_k=11, top_p=0.8)
    generate(engine, requests)
    launch = engine._executor.launch

    def launch_strictly(work):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(work)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine._executor.launch = launch_strictly
    assert len(generate(engine, requests)) == len(requests)


def test_no_pass_sees_mixed_weights(tmp_path):
    """Keys and values are computed anew after each update, so every token is of one version or wrong."""
    models = [tiny(tmp_path / str(i), seed=i, num_layers=6) for i in range(2)]
    gpu_models = [on_gpu(model, torch.float32) for model in models]
    blobs = [list(to_blobs(model)) for model in gpu_models]
    engine = build(on_gpu(models[0], torch.float32), max_running=16, kv_tokens=8192, recompute_kv=True)
    requests = crowd(count=10, max_tokens=120)
    for request in requests:
        engine.submit(request)
    done, version, num_steps = {}, 0, 0
    while engine.has_work:
        done.update(engine.step())
        num_steps += 1
        if num_steps % 3 == 0:
            version += 1
            engine.apply(version, blobs[version % 2])
    references = [build(model) for model in models]
    for request in requests:
        completion = done[request.id]
        scores = [
            reference.score([whole(request, completion)], 1.0)[0][len(request.prompt_ids) :]
            for reference in references
        ]
        expected = np.where(completion.versions % 2 == 0, scores[0], scores[1])
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-3)


def test_memory_is_given_back_and_does_not_grow(tmp_path):
    engine = build(on_gpu(tiny(tmp_path), torch.bfloat16), max_running=32, memory_share=0.1)
    generate(engine, crowd(count=40))
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_allocated(), engine.counters()["free_blocks"]
    for _ in range(5):
        generate(engine, crowd(count=40))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    assert engine.counters()["free_blocks"] == free


def test_uncompiled_gives_the_same(tmp_path):
    model = tiny(tmp_path)
    requests = crowd()
    engines = [
        build(on_gpu(model, torch.float32), max_running=16, kv_tokens=8192, compiled=compiled)
        for compiled in (True, False)
    ]
    compiled, eager = (generate(engine, requests) for engine in engines)
    for request in requests:
        np.testing.assert_array_equal(compiled[request.id].token_ids, eager[request.id].token_ids)
