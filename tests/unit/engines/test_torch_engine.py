"""Continuous batching: bits that do not depend on company, sharing, preemption, resumption, versions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.engines.make import torch_engine
from headrace.errors import TaskError, WeightSyncError
from headrace.models.float_residual import keep_float_residual
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.tensors import to_blobs
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger

LENGTHS = (3, 40, 17, 90, 1, 33, 65, 12)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    """Another set of weights for the same model."""
    return make_tiny_model(
        tmp_path_factory.mktemp("other"),
        vocab_size=61,
        init_std=0.12,
        tie_embeddings=False,
        context_tokens=256,
        seed=1,
    )


@pytest.fixture
def crowd(make_request):
    return [make_request(f"r{i}", prompt=n, max_tokens=15 + 9 * i) for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"prefill_tokens": 7}, {"block_size": 4}, {"max_running": 3}, {"kv_tokens": 192}],
    ids=["alone", "small chunks", "small blocks", "few slots", "preempted"],
)
def test_bits_do_not_depend_on_company(make_engine, run_engine, crowd, same_bits, settings):
    together = run_engine(make_engine(), *crowd)
    engine = make_engine(**settings)
    if settings:
        other = run_engine(engine, *reversed(crowd))
    else:
        other = {}
        for request in crowd:
            other.update(run_engine(engine, request))
    assert all(same_bits(together[r.id], other[r.id]) for r in crowd)
    assert (engine.counters()["preemptions"] > 0) == ("kv_tokens" in settings)


def test_grouped_query_and_softcap_models_are_invariant_too(tmp_path, run_engine, crowd, same_bits):
    make_tiny_model(
        tmp_path,
        family="gemma2",
        vocab_size=61,
        num_kv_heads=2,
        softcap=4.0,
        init_std=0.12,
        tie_embeddings=False,
    )
    engines = [torch_engine(load_model(tmp_path), ledger=TimeLedger(ENGINE_ACTIVITIES)) for _ in range(2)]
    together = run_engine(engines[0], *crowd)
    alone = {}
    for request in crowd:
        alone.update(run_engine(engines[1], request))
    assert all(same_bits(together[r.id], alone[r.id]) for r in crowd)


def test_rows_too_long_for_a_dense_copy_give_the_same_bits(
    make_engine, run_engine, crowd, same_bits, monkeypatch
):
    dense = run_engine(make_engine(), *crowd)
    monkeypatch.setattr("headrace.engines.plain_executor.RESIDENT_BYTES", 4 * 64 * 1024 * 48)
    part = run_engine(make_engine(), *crowd)
    assert all(same_bits(dense[r.id], part[r.id]) for r in crowd)


def test_abort_and_resume_equals_uninterrupted(make_engine, run_engine, make_request, same_bits):
    request = make_request("a", prompt=30, max_tokens=60, temperature=0.9, top_k=20)
    whole = run_engine(make_engine(), request)["a"]
    engine = make_engine()
    engine.submit(request)
    for _ in range(25):
        engine.step()
    ((name, part),) = engine.abort(["a", "unknown"])
    assert name == "a" and part.finish_reason == "abort" and 0 < part.num_tokens < 60
    assert not engine.has_work
    resumed = make_request("a", prompt=30, max_tokens=60, temperature=0.9, top_k=20, prefix=part)
    again = run_engine(make_engine(), resumed)["a"]
    assert same_bits(again, whole)
    np.testing.assert_array_equal(again.sampling_mask.token_ids, whole.sampling_mask.token_ids)
    np.testing.assert_array_equal(again.sampling_mask.offsets, whole.sampling_mask.offsets)


def test_a_resumed_request_that_was_already_complete_ends_at_once(make_engine, run_engine, make_request):
    done = run_engine(make_engine(), make_request("a", max_tokens=9))["a"]
    full = run_engine(make_engine(), make_request("a", max_tokens=9, prefix=done))["a"]
    assert full.finish_reason == "length"
    np.testing.assert_array_equal(full.token_ids, done.token_ids)
    stop = int(done.token_ids[-1])
    ended = run_engine(make_engine(), make_request("a", max_tokens=50, stop_ids=(stop,), prefix=done))["a"]
    assert ended.finish_reason == "stop" and ended.num_tokens == 9


def test_a_group_computes_its_prompt_once(make_engine, run_engine, make_request, same_bits):
    group = [make_request(f"g{i}", prompt=np.arange(50) % 61, seed=i) for i in range(6)]
    engine = make_engine()
    together = run_engine(engine, *group)
    counters = engine.counters()
    assert counters["cache_hit_tokens"] == 5 * 48
    assert counters["prefill_tokens"] == 50 + 5 * 2
    alone = run_engine(make_engine(), group[3])
    assert same_bits(alone["g3"], together["g3"])
    assert len({tuple(c.token_ids) for c in together.values()}) == 6


@pytest.mark.parametrize("prefill_tokens", [512, 20])
def test_a_prompt_that_fills_its_blocks_is_computed_once_but_for_its_last_token(
    make_engine, run_engine, make_request, same_bits, prefill_tokens
):
    """Also by members that begin in a later pass."""
    group = [make_request(f"g{i}", prompt=np.arange(48) % 61, seed=i) for i in range(6)]
    engine = make_engine(prefill_tokens=prefill_tokens)
    together = run_engine(engine, *group)
    counters = engine.counters()
    assert counters["cache_hit_tokens"] == 5 * 47
    assert counters["prefill_tokens"] == 48 + 5
    for request in group:
        assert same_bits(run_engine(make_engine(), request)[request.id], together[request.id])


def test_a_long_prompt_is_shared_while_it_is_still_being_computed(make_engine, run_engine, make_request):
    engine = make_engine(prefill_tokens=32)
    run_engine(engine, *[make_request(f"g{i}", prompt=np.arange(200) % 61, max_tokens=2) for i in range(3)])
    assert engine.counters()["prefill_tokens"] == 200 + 2 * 8


def test_a_block_that_is_filled_elsewhere_meanwhile_is_not_taken_over_half_way(
    make_engine, run_engine, make_request, same_bits
):
    """The follower is inside the block that the first request fills while it decodes."""
    first = make_request("first", prompt=45, max_tokens=30)
    sampled = run_engine(make_engine(), first)["first"].token_ids
    follower = make_request("follower", prompt=np.concatenate((first.prompt_ids, sampled[:20])))
    alone = run_engine(make_engine(), follower)["follower"]
    engine = make_engine(prefill_tokens=2)
    assert same_bits(run_engine(engine, first, follower)["follower"], alone)
    assert engine.counters()["cache_hit_tokens"] == 32


def test_a_completion_is_found_again_as_part_of_the_next_prompt(
    make_engine, run_engine, make_request, same_bits
):
    engine = make_engine()
    first = run_engine(engine, make_request("t1", prompt=20, max_tokens=30))["t1"]
    prompt = np.concatenate((make_request("t1", prompt=20).prompt_ids, first.token_ids, [5, 6]))
    turn = make_request("t2", prompt=prompt)
    hit = run_engine(engine, turn)["t2"]
    assert engine.counters()["cache_hit_tokens"] == 48
    assert same_bits(hit, run_engine(make_engine(), turn)["t2"])


def test_stop_ids_end_a_completion_and_belong_to_it(make_engine, run_engine, make_request):
    free = run_engine(make_engine(), make_request("a", max_tokens=40))["a"]
    stop = int(free.token_ids[10])
    first = int(np.flatnonzero(free.token_ids == stop)[0])
    got = run_engine(make_engine(), make_request("a", max_tokens=40, stop_ids=(stop, 60)))["a"]
    assert got.finish_reason == "stop"
    np.testing.assert_array_equal(got.token_ids, free.token_ids[: first + 1])


def test_nobody_ends_at_the_stop_ids_of_others(make_engine, run_engine, make_request, same_bits):
    """Neither at those of who had the slot before, nor at what fills a row when somebody has more of them."""
    free = make_request("free", max_tokens=60, stop_ids=())
    alone = run_engine(make_engine(), free)["free"]
    assert 0 in alone.token_ids[2:]
    engine = make_engine(max_running=2)
    run_engine(engine, make_request("before", max_tokens=3, stop_ids=(0, *alone.token_ids[:5].tolist())))
    assert same_bits(run_engine(engine, free)["free"], alone)
    engine = make_engine(max_running=2)
    engine.submit(free)
    engine.step()
    assert same_bits(run_engine(engine, make_request("beside", stop_ids=(58, 59, 60)))["free"], alone)


def test_who_was_sent_back_goes_on_before_those_that_have_not_begun(make_engine, make_request):
    engine = make_engine(kv_tokens=96)
    for name, prompt in (("old", 33), ("young", 33), ("small", 5)):
        engine.submit(make_request(name, prompt=prompt, max_tokens=40))
    done = {}
    while not engine.counters()["preemptions"]:
        done.update(engine.step())
    while "old" not in done:
        assert engine.started_ids() == ["old", "young"]
        done.update(engine.step())
    while engine.has_work:
        done.update(engine.step())
    assert {completion.num_tokens for completion in done.values()} == {40}


def test_who_is_sent_back_and_begins_again_in_the_same_pass_is_computed_once(
    make_engine, run_engine, make_request, same_bits
):
    """Two that sample the same fill the same blocks. When these run out the younger one is sent back, finds all it
    needs with the older one and gets its slot again at once."""
    twins = [make_request(name, prompt=np.arange(33), seed=5, max_tokens=40) for name in "ab"]
    alone = run_engine(make_engine(), twins[0])["a"]
    engine = make_engine(kv_tokens=96)
    together = run_engine(engine, *twins)
    assert engine.counters()["preemptions"] == 1 and engine.counters()["generated_tokens"] == 80
    assert all(same_bits(completion, alone) for completion in together.values())


@pytest.mark.parametrize(
    ("blocks", "prefill_tokens", "prompt", "known", "delay", "max_tokens"),
    [(5, 6, 7, 56, 42, 20), (9, 6, 68, 126, 22, 1)],
    ids=["goes on", "ends at once"],
)
def test_a_prompt_that_is_sent_back_and_begins_again_in_the_same_pass_is_computed_once(
    make_engine, run_engine, make_request, blocks, prefill_tokens, prompt, known, delay, max_tokens
):
    """In the middle of its prefill: what it lacks has been filled by one that samples what it is given."""
    first = make_request("first", prompt=prompt, max_tokens=100, top_k=9)
    sampled = run_engine(make_engine(), first)["first"].token_ids
    tokens = np.concatenate((first.prompt_ids, sampled))[:known]
    engine, done = make_engine(kv_tokens=16 * blocks, prefill_tokens=prefill_tokens), {}
    engine.submit(first)
    for _ in range(delay):
        done.update(engine.step())
    done |= run_engine(engine, make_request("next", prompt=tokens, max_tokens=max_tokens, top_k=9))
    assert len(done["next"].sampling_mask.offsets) == max_tokens + 1 == done["next"].num_tokens + 1


def test_sampling_mask_holds_the_drawn_token(make_engine, run_engine, make_request):
    requests = [make_request("cut", top_p=0.8), make_request("free")]
    done = run_engine(make_engine(), *requests)
    mask = done["cut"].sampling_mask
    assert len(mask.offsets) == done["cut"].num_tokens + 1
    for i, token in enumerate(done["cut"].token_ids):
        assert token in mask.token_ids[mask.offsets[i] : mask.offsets[i + 1]]
    assert done["free"].sampling_mask is None


def test_a_prompt_beyond_the_context_fails_alone(make_engine, run_engine, make_request):
    engine = make_engine()
    with pytest.raises(TaskError, match="prompt of 256 tokens"):
        engine.submit(make_request("long", prompt=256))
    with pytest.raises(TaskError, match="prompt of 0 tokens"):
        engine.submit(make_request("empty", prompt=0))
    done = run_engine(engine, make_request("fits", prompt=250, max_tokens=50))
    assert done["fits"].finish_reason == "length" and done["fits"].num_tokens == 6


def test_a_live_id_is_refused(make_engine, make_request):
    engine = make_engine()
    engine.submit(make_request("a"))
    with pytest.raises(TaskError, match="already in use"):
        engine.submit(make_request("a"))


def test_versions_are_stamped_by_the_pass_that_made_the_token(make_engine, make_request, other_weights):
    engine = make_engine()
    engine.submit(make_request("a", prompt=12, max_tokens=10))
    for _ in range(4):
        assert engine.step() == []
    engine.apply(7, to_blobs(other_weights))
    done = []
    while not done:
        done = engine.step()
    got = done[0][1]
    assert engine.version == 7
    np.testing.assert_array_equal(got.versions, [0] * 4 + [7] * 6)
    # The fourth token was drawn before the update and written to the cache after it.
    np.testing.assert_array_equal(got.kv_versions, [[0, 15], [7, 6]])


def test_blocks_from_before_an_update_are_not_matched(
    make_engine, run_engine, make_request, other_weights, same_bits
):
    engine = make_engine()
    prompt = np.arange(50) % 61
    run_engine(engine, make_request("before", prompt=prompt))
    engine.apply(1, to_blobs(other_weights))
    after = run_engine(engine, make_request("after", prompt=prompt))["after"]
    assert engine.counters()["cache_hit_tokens"] == 0
    fresh = make_engine()
    fresh.apply(1, to_blobs(other_weights))
    assert same_bits(after, run_engine(fresh, make_request("after", prompt=prompt))["after"])


def test_blocks_that_attended_to_older_rows_are_not_matched(
    make_engine, run_engine, make_request, other_weights, same_bits
):
    """A request that runs across an update fills new blocks, but these depend on its old rows."""
    engine = make_engine()
    crossing = make_request("crossing", prompt=20, max_tokens=60)
    engine.submit(crossing)
    for _ in range(5):
        engine.step()
    engine.apply(1, to_blobs(other_weights))
    done = run_engine(engine)["crossing"]
    follow = make_request("follow", prompt=np.concatenate((crossing.prompt_ids, done.token_ids)))
    fresh = make_engine()
    fresh.apply(1, to_blobs(other_weights))
    # The first run publishes fresh leading blocks, whose chain the crossing request's later ones continue.
    run_engine(
        engine, make_request("lead", prompt=np.concatenate((crossing.prompt_ids, done.token_ids[:20])))
    )
    assert same_bits(run_engine(engine, follow)["follow"], run_engine(fresh, follow)["follow"])


def test_rows_that_were_not_computed_again_are_not_said_to_be(make_engine, make_request, other_weights):
    """A resumed request that ends in the middle of its prefill tells what wrote its rows when all were there."""
    engine = make_engine(prefill_tokens=8)
    request = make_request("a", prompt=30, max_tokens=40)
    engine.submit(request)
    for _ in range(10):
        engine.step()
    ((_, part),) = engine.abort(["a"])
    engine.apply(1, to_blobs(other_weights))
    engine.submit(make_request("a", prompt=30, max_tokens=40, prefix=part))
    engine.step()
    ((_, same),) = engine.abort(["a"])
    np.testing.assert_array_equal(same.token_ids, part.token_ids)
    np.testing.assert_array_equal(same.kv_versions, part.kv_versions)
    assert part.kv_versions.tolist() == [[0, 30 + part.num_tokens - 1]]


def test_recompute_option_rewrites_running_rows(make_engine, run_engine, make_request, other_weights):
    engine = make_engine(recompute_kv=True)
    engine.submit(make_request("a", prompt=12, max_tokens=10))
    for _ in range(4):
        engine.step()
    engine.apply(3, to_blobs(other_weights))
    got = run_engine(engine)["a"]
    np.testing.assert_array_equal(got.versions, [0] * 4 + [3] * 6)
    np.testing.assert_array_equal(got.kv_versions, [[3, 21]])


def test_requests_that_compute_their_keys_anew_keep_their_order(make_engine, make_request, other_weights):
    """When blocks run out the youngest is sent back, so the oldest must stay the oldest."""
    engine = make_engine(recompute_kv=True)
    for name in "abc":
        engine.submit(make_request(name, max_tokens=10))
    engine.step()
    engine.apply(1, to_blobs(other_weights))
    engine.step()
    assert [sequence.request.id for sequence in engine._scheduler.running] == ["a", "b", "c"]


def test_an_update_that_does_not_fit_changes_nothing(
    make_engine, run_engine, make_request, other_weights, same_bits
):
    engine = make_engine()
    blobs = list(to_blobs(other_weights))
    with pytest.raises(WeightSyncError, match="missing"):
        engine.apply(5, blobs[:-1])
    assert engine.version == 0
    request = make_request("a")
    assert same_bits(run_engine(engine, request)["a"], run_engine(make_engine(), request)["a"])


def test_scoring_makes_room_and_disturbs_nobody(make_engine, run_engine, make_request, same_bits):
    request = make_request("a", prompt=40, max_tokens=30)
    alone = run_engine(make_engine(), request)["a"]
    engine = make_engine(kv_tokens=96)
    engine.submit(request)
    for _ in range(8):
        engine.step()
    tokens = np.concatenate((request.prompt_ids, alone.token_ids))
    (scored,) = engine.score([tokens])
    assert engine.counters()["preemptions"] == 1
    assert same_bits(run_engine(engine)["a"], alone)
    np.testing.assert_allclose(scored[40:], alone.logprobs, atol=1e-6)


def test_progress_reports_each_so_many_tokens(make_engine, make_request):
    engine = make_engine()
    engine.submit(make_request("a", max_tokens=25))
    seen = []
    while engine.has_work:
        engine.step()
        seen += [snapshot.num_tokens for _, snapshot in engine.progress(8)]
    assert seen == [8, 16, 24]


def test_what_a_request_came_with_is_not_reported_as_new(make_engine, make_request):
    engine = make_engine()
    engine.submit(make_request("a", max_tokens=30))
    for _ in range(10):
        engine.step()
    ((_, part),) = engine.abort(["a"])
    engine.submit(make_request("a", max_tokens=30, prefix=part))
    seen = []
    while engine.has_work:
        engine.step()
        seen += [snapshot.num_tokens for _, snapshot in engine.progress(8)]
    assert part.num_tokens == 10 and seen == [18, 26]


def test_requests_that_began_together_report_in_turns(make_engine, make_request):
    engine = make_engine()
    for i in range(12):
        engine.submit(make_request(f"r{i}", prompt=4, max_tokens=40))
    reports, last = [], {}
    while engine.has_work:
        engine.step()
        reports.append(engine.progress(8))
        last |= {name: snapshot.num_tokens for name, snapshot in reports[-1]}
    assert max(len(report) for report in reports) == 2
    assert len(last) == 12 and min(last.values()) >= 24


def test_logits_of_a_narrow_model_are_not_rounded(tiny_checkpoint):
    engine_model, model = (load_model(tiny_checkpoint, dtype="bfloat16") for _ in range(2))
    engine = torch_engine(engine_model, ledger=TimeLedger(ENGINE_ACTIVITIES))
    keep_float_residual(model)
    tokens = np.arange(40) * 7 % 61
    (scored,) = engine.score([tokens])
    with torch.no_grad():
        hidden = model.base_model(torch.from_numpy(tokens)[None]).last_hidden_state[0]
        logits = hidden.float() @ model.lm_head.weight.float().T
        rounded = model.lm_head(hidden).float()
    picked = [
        x[:-1].log_softmax(-1).gather(1, torch.from_numpy(tokens[1:, None]))[:, 0] for x in (logits, rounded)
    ]
    errors = [float(np.abs(scored[1:] - x.numpy()).mean()) for x in picked]
    assert errors[0] < 0.7 * errors[1]


def test_time_is_split_between_prefill_and_decode(tiny_checkpoint, make_request):
    ticks = iter(range(100000))
    ledger = TimeLedger(ENGINE_ACTIVITIES, clock=lambda: float(next(ticks)))
    engine = torch_engine(load_model(tiny_checkpoint), ledger=ledger)
    engine.submit(make_request("a", prompt=40, max_tokens=5))
    engine.step()
    assert ledger.seconds()["prefill"] > 0 and ledger.seconds()["decode"] == 0
    engine.submit(make_request("b", prompt=3, max_tokens=5))
    before = ledger.seconds()
    engine.step()
    after = ledger.seconds()
    assert after["prefill"] - before["prefill"] == pytest.approx(0.75)
    assert after["decode"] - before["decode"] == pytest.approx(0.25)


def test_a_prompt_whose_last_rows_join_an_earlier_group_samples_from_its_own_last_row(
    make_engine, run_engine, make_request, same_bits
):
    """Two chunks in one pass: the first, found in the cache up to row 32, opens the group of padded length
    48; the second fills it with its last rows and opens the group of its first rows afterwards."""
    known = make_request("known", prompt=33, max_tokens=1)
    longer = make_request("longer", prompt=np.append(known.prompt_ids, np.arange(31)), max_tokens=4)
    other = make_request("other", prompt=48, max_tokens=4)
    alone = run_engine(make_engine(), other)["other"]
    engine = make_engine()
    run_engine(engine, known)
    assert same_bits(run_engine(engine, longer, other)["other"], alone)
    assert engine.counters()["cache_hit_tokens"] == 32
