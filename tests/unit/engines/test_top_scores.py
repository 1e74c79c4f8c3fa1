"""The likeliest tokens of given sequences, from both executors."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from headrace.engines.driver import EngineDriver
from headrace.engines.scripted import ScriptedEngine
from headrace.models.loading import load_model
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.weights.transports import TransportReceiver

TEXTS = [np.random.default_rng(n).integers(0, 61, n).astype(np.int32) for n in (1, 2, 30, 70)]


@pytest.mark.parametrize("executor", ["plain", "device"])
def test_entries_are_those_of_a_whole_forward(executor, make_engine, make_device_engine, tiny_checkpoint):
    engine = make_engine(prefill_tokens=19) if executor == "plain" else make_device_engine(prefill_tokens=19)
    model = load_model(tiny_checkpoint)
    for ids, scores in zip(TEXTS, engine.score_top(TEXTS, 5, 0.8), strict=True):
        with torch.no_grad():
            logits_TV = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        full_TV = (logits_TV / 0.8).log_softmax(-1).numpy()
        assert scores.logprobs.dtype == scores.top_logprobs.dtype == np.float32
        assert scores.top_ids.dtype == np.int32 and scores.top_ids.shape == (len(ids), 5)
        assert np.isneginf(scores.top_logprobs[0]).all() and scores.logprobs[0] == 0
        for t in range(1, len(ids)):
            expected = np.sort(full_TV[t - 1])[::-1][:5]
            np.testing.assert_allclose(scores.top_logprobs[t], expected, atol=2e-5)
            np.testing.assert_allclose(full_TV[t - 1, scores.top_ids[t]], expected, atol=2e-5)
            assert scores.logprobs[t] == pytest.approx(full_TV[t - 1, ids[t]], abs=2e-5)


def test_own_tokens_are_scored_as_without_entries(make_engine):
    engine = make_engine()
    for plain, scores in zip(engine.score(TEXTS, 0.7), engine.score_top(TEXTS, 3, 0.7), strict=True):
        assert np.array_equal(plain, scores.logprobs)


def test_a_small_vocabulary_leaves_entries_out(make_engine):
    (scores,) = make_engine().score_top(TEXTS[2:3], 100)
    assert scores.top_ids.shape == (30, 100)
    assert np.isneginf(scores.top_logprobs[:, 61:]).all() and np.isfinite(scores.top_logprobs[1:, :61]).all()
    np.testing.assert_allclose(np.exp(scores.top_logprobs[1:]).sum(-1), 1, atol=1e-5)


def test_the_driver_and_the_public_fake_answer_alike(make_engine):
    async def main():
        ledger = TimeLedger(ENGINE_ACTIVITIES)
        driver = EngineDriver(make_engine(), TransportReceiver(), ledger=ledger)
        real = await driver.score_top(TEXTS, top_k=4, temperature=0.5)
        await driver.close()
        return real, await ScriptedEngine().score_top(TEXTS, top_k=4)

    for real, scripted in zip(*asyncio.run(main()), strict=True):
        for name in ("logprobs", "top_ids", "top_logprobs"):
            a, b = getattr(real, name), getattr(scripted, name)
            assert a.shape == b.shape and a.dtype == b.dtype, name
