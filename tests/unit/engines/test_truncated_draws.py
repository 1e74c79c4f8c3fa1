"""Truncated requests on the device path: tokens, log-probabilities and kept sets of the plain executor."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engines.make import torch_engine
from headrace.engines.truncated_draws import LISTED_TOKENS
from headrace.models.loading import load_model, make_tiny_model
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger

KINDS = (
    {},
    {"top_k": 5},
    {"temperature": 0.7},
    {"top_p": 0.7, "min_p": 0.02},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 9, "top_p": 0.9},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.5},
    {"temperature": 1.4, "min_p": 0.1},
    {"top_k": 1000},
)


def agree(a, b):
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert a.finish_reason == b.finish_reason
    assert (a.sampling_mask is None) == (b.sampling_mask is None)
    if a.sampling_mask is not None:
        np.testing.assert_array_equal(a.sampling_mask.token_ids, b.sampling_mask.token_ids)
        np.testing.assert_array_equal(a.sampling_mask.offsets, b.sampling_mask.offsets)


def kept_sets(completion):
    mask = completion.sampling_mask
    assert len(mask.offsets) == completion.num_tokens + 1
    return np.split(mask.token_ids, mask.offsets[1:-1])


@pytest.mark.parametrize(
    "settings",
    [{}, {"prefill_tokens": 7}, {"max_running": 3}, {"kv_tokens": 192}],
    ids=["plain", "small chunks", "few slots", "preempted"],
)
def test_truncated_plain_and_greedy_rows_mix(
    make_engine, make_device_engine, run_engine, make_request, settings
):
    crowd = [
        make_request(f"k{i}", prompt=20 + i, max_tokens=15 + 4 * i, stop_ids=(7, 13), **kind)
        for i, kind in enumerate(KINDS)
    ]
    expected, engine = run_engine(make_engine(), *crowd), make_device_engine(**settings)
    got = run_engine(engine, *crowd)
    assert (engine.counters()["preemptions"] > 0) == ("kv_tokens" in settings)
    for request in crowd:
        agree(got[request.id], expected[request.id])
        assert (got[request.id].sampling_mask is not None) == request.sampling.truncates


def test_members_of_a_group_draw_from_their_own_kept_sets(
    make_engine, make_device_engine, run_engine, make_request
):
    group = [
        make_request(f"g{i}", prompt=np.arange(50) % 61, seed=i, top_k=(0, 4, 12)[i % 3], top_p=0.9)
        for i in range(6)
    ]
    engine = make_device_engine()
    expected, got = run_engine(make_engine(), *group), run_engine(engine, *group)
    assert engine.counters()["cache_hit_tokens"] == 5 * 48
    for request in group:
        agree(got[request.id], expected[request.id])
        for token, kept in zip(got[request.id].token_ids, kept_sets(got[request.id]), strict=True):
            assert token in kept and len(kept) <= (request.sampling.top_k or 61)


def test_sets_that_outgrow_their_list_are_recorded_whole(
    tmp_path, make_device_engine, run_engine, make_request
):
    make_tiny_model(tmp_path, vocab_size=1500, init_std=0.02, tie_embeddings=False, context_tokens=256)
    kinds = ({"top_p": 0.9}, {"top_k": 1200}, {"min_p": 0.2}, {"top_k": 3}, {"top_k": LISTED_TOKENS}, {})
    crowd = [make_request(f"f{i}", prompt=9, max_tokens=6, **kind) for i, kind in enumerate(kinds)]
    plain = torch_engine(load_model(tmp_path), ledger=TimeLedger(ENGINE_ACTIVITIES))
    expected, got = run_engine(plain, *crowd), run_engine(make_device_engine(tmp_path), *crowd)
    for name, completion in expected.items():
        agree(got[name], completion)
    sizes = {len(kept) for request in crowd[:-1] for kept in kept_sets(got[request.id])}
    assert {3, LISTED_TOKENS, 1200} < sizes and max(sizes) > 1200


@pytest.mark.parametrize("which", ["plain", "device"])
def test_a_greedy_request_has_no_kept_sets(make_engine, make_device_engine, run_engine, make_request, which):
    engine = {"plain": make_engine, "device": make_device_engine}[which]()
    done = run_engine(engine, make_request("g", max_tokens=5, temperature=0.0, top_k=3))
    assert done["g"].num_tokens == 5 and done["g"].sampling_mask is None
