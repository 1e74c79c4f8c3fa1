"""The engine's log-probabilities against a plain eager forward of the same model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.engines.make import torch_engine
from headrace.models.loading import load_model, make_tiny_model
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import Request, Sampling

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3_moe")
VOCAB = 61


def eager_logprobs(model, token_ids, temperature=1.0):
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor(token_ids)[None], use_cache=False).logits[0] / temperature
    table = logits.log_softmax(-1)
    return table[np.arange(len(token_ids) - 1), token_ids[1:]].numpy()


def run_all(engine, requests):
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.has_work:
        done.update(engine.step())
    return done


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    make_tiny_model(
        directory,
        family=request.param,
        vocab_size=VOCAB,
        num_kv_heads=2,
        sliding_window=24,
        softcap=3.0,
        init_std=0.15,
        tie_embeddings=request.param in ("qwen2", "qwen3"),
    )
    return directory


def test_sampled_logprobs_agree_with_eager(checkpoint):
    engine = torch_engine(
        load_model(checkpoint), ledger=TimeLedger(ENGINE_ACTIVITIES), block_size=8, prefill_tokens=19
    )
    rng = np.random.default_rng(0)
    requests = [
        Request(
            id=str(i),
            prompt_ids=rng.integers(0, VOCAB, n).astype(np.int32),
            sampling=Sampling(max_tokens=20 + i, temperature=0.7 + 0.1 * i),
            seed=i,
        )
        for i, n in enumerate((3, 40, 61, 17, 90))
    ]
    done = run_all(engine, requests)
    reference = load_model(checkpoint)
    for request in requests:
        got = done[request.id]
        assert got.num_tokens == request.sampling.max_tokens and got.finish_reason == "length"
        token_ids = np.concatenate((request.prompt_ids, got.token_ids))
        expected = eager_logprobs(reference, token_ids, request.sampling.temperature)
        expected = expected[len(request.prompt_ids) - 1 :]
        assert expected.std() > 0.3
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5, rtol=0)


def test_score_agrees_with_eager(checkpoint):
    engine = torch_engine(
        load_model(checkpoint), ledger=TimeLedger(ENGINE_ACTIVITIES), block_size=8, prefill_tokens=19
    )
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, VOCAB, n) for n in (2, 30, 75)]
    reference = load_model(checkpoint)
    for token_ids, scored in zip(texts, engine.score(texts, 0.8), strict=True):
        assert scored.dtype == np.float32 and scored[0] == 0.0
        np.testing.assert_allclose(scored[1:], eager_logprobs(reference, token_ids, 0.8), atol=1e-5, rtol=0)
