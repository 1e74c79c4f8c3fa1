"""Branches forked from held blocks on a GPU, against a fresh prefill there; the time of both at a long prefix.

pytest tests/gpu/test_forks_gpu.py -s    # prints the times
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.engines.make import torch_engine
from headrace.models.loading import load_model, make_tiny_model
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import BLOCK_TOKENS, ForkPoint, Request, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

VOCAB = 199


def build(directory, dtype, *, context_tokens, **settings):
    shape = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "init_std": 0.08}
    make_tiny_model(directory, vocab_size=VOCAB, tie_embeddings=False, context_tokens=context_tokens, **shape)
    model = load_model(directory)

    def engine():
        on_gpu = copy.deepcopy(model).to(device="cuda", dtype=dtype)
        return torch_engine(on_gpu, ledger=TimeLedger(ENGINE_ACTIVITIES), **settings)

    return engine


def generate(engine, *requests):
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.has_work:
        done.update(engine.step())
    return done


def root(num_prompt, max_tokens):
    ids = np.random.default_rng(5).integers(0, VOCAB, num_prompt).astype(np.int32)
    sampling = Sampling(max_tokens=max_tokens)
    return Request(id="root", prompt_ids=ids, sampling=sampling, seed=1, hold_s=600.0)


def branches(request, completion, pivot, *, num=8, max_tokens=32, name="b"):
    prompt = np.concatenate([request.prompt_ids, completion.token_ids[:pivot]])
    fork = ForkPoint(request_id=request.id, num_tokens=len(prompt), version=0)
    sampling = Sampling(max_tokens=max_tokens)
    return [
        Request(id=f"{name}{i}", prompt_ids=prompt, sampling=sampling, seed=100 + i, fork=fork)
        for i in range(num)
    ]


def num_forked(num_prompt):
    """Of a branch's prompt: the blocks that it fills, but never its last token, whose logits are needed."""
    return min(num_prompt // BLOCK_TOKENS * BLOCK_TOKENS, num_prompt - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("pivot", [1, 14, 40, 77])
def test_a_branch_samples_what_a_fresh_prefill_does(tmp_path, dtype, pivot):
    """After 14 tokens the prompt fills its blocks."""
    engine = build(tmp_path, dtype, context_tokens=512, max_running=16, kv_tokens=8192)
    forking, first = engine(), root(50, 90)
    completion = generate(forking, first)["root"]
    family = branches(first, completion, pivot)
    forked = generate(forking, *family)
    fresh = generate(engine(), *[replace(r, fork=None) for r in family])
    counters = forking.counters()
    assert counters["forks"] == len(family)
    assert counters["forked_tokens"] == len(family) * num_forked(50 + pivot)
    tolerance = 1e-3 if dtype == torch.float32 else 0.25
    same = [r.id for r in family if np.array_equal(forked[r.id].token_ids, fresh[r.id].token_ids)]
    # A draw differs only where two tokens tie to rounding.
    assert len(same) >= len(family) - (1 if dtype == torch.float32 else 4)
    for name in same:
        np.testing.assert_allclose(forked[name].logprobs, fresh[name].logprobs, atol=tolerance, rtol=0)
    forking.release(["root"])
    assert forking.counters()["holds"] == 0


@pytest.mark.parametrize("num_prefix", [4096, 16384])
def test_forks_of_long_prefixes_save_their_prefill(tmp_path, num_prefix):
    engine = build(tmp_path, torch.bfloat16, context_tokens=32768, max_running=16, kv_tokens=65536)()
    first = root(num_prefix, 64)
    completion = generate(engine, first)["root"]
    times = {}
    for name, is_fork in (("warm-up", True), ("fork", True), ("prefill", False)):
        family = branches(first, completion, 32, max_tokens=4, name=name)
        if not is_fork:
            # Another first token: nothing of it is cached.
            prompt = family[0].prompt_ids.copy()
            prompt[0] = (prompt[0] + 1) % VOCAB
            family = [replace(r, prompt_ids=prompt, fork=None) for r in family]
        torch.cuda.synchronize()
        began = time.perf_counter()
        generate(engine, *family)
        torch.cuda.synchronize()
        times[name] = time.perf_counter() - began
    print(f"\nprefix {num_prefix}: 8 branches of 4 tokens, forked {times['fork'] * 1e3:.1f} ms, "
          f"prefilled once {times['prefill'] * 1e3:.1f} ms")  # fmt: skip
    # Two families of 8, whose prompts fill their blocks: each branch computes one token for its logits.
    assert engine.counters()["forked_tokens"] == 16 * num_forked(num_prefix + 32)
