"""The experts of every computed token, as the engine records them, against the routers of a plain forward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.data import completions
from headrace.data.routing import RouterShape, check_routing
from headrace.engines.device_executor import DeviceExecutor
from headrace.engines.make import torch_engine
from headrace.engines.torch_engine import TorchEngine
from headrace.errors import ModelError, RecordError
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.route_recording import RouteRecorder
from headrace.models.routers import routers
from headrace.models.tensors import to_blobs
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import ForkPoint

VOCAB = 61
EXECUTORS = ["plain", "device"]


def make_moe(directory, family="qwen3_moe", **settings):
    made = {"vocab_size": VOCAB, "init_std": 0.12, "tie_embeddings": False, "context_tokens": 256}
    return make_tiny_model(directory, family=family, **{**made, "num_layers": 3, **settings})


@pytest.fixture(scope="session")
def moe(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny-moe")
    make_moe(directory)
    return directory


def engine_with(checkpoint, kind="plain", *, recompute_kv=False, record_routes=True, **settings):
    model, ledger = load_model(checkpoint), TimeLedger(ENGINE_ACTIVITIES)
    given = {"max_running": 12, "block_size": 16, "kv_tokens": 2048, "prefill_tokens": 512, **settings}
    if kind == "plain":
        return torch_engine(
            model, ledger=ledger, recompute_kv=recompute_kv, record_routes=record_routes, **given
        )
    executor = DeviceExecutor(model, compiled=False, record_routes=record_routes, **given)
    return TorchEngine(
        executor, ledger=ledger, prefill_tokens=given["prefill_tokens"], recompute_kv=recompute_kv
    )


def plain_routes(checkpoint, token_ids):
    """Sorted experts [T, M, K] of a forward of the model as transformers has it."""
    model, heard = load_model(checkpoint), []
    for router in routers(model).values():
        router.register_forward_hook(lambda _, __, output: heard.append(output[2]))
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        model(input_ids=torch.from_numpy(np.asarray(token_ids, dtype=np.int64))[None], use_cache=False)
    return torch.stack(heard, 1).sort(-1).values.numpy()


def check_against_plain(checkpoint, request, completion):
    tokens = np.concatenate((request.prompt_ids, completion.token_ids))
    expected, routing = plain_routes(checkpoint, tokens), completion.routing
    check_routing(routing, num_tokens=len(tokens))
    assert routing.recorded.tolist() == [True] * (len(tokens) - 1) + [False]
    np.testing.assert_array_equal(np.sort(routing.experts, -1), expected[:-1])
    return routing


def crowd_of(make_request, count=6):
    return [
        make_request(f"r{i}", prompt=n, max_tokens=10 + 9 * i, stop_ids=(7,))
        for i, n in enumerate((3, 40, 17, 90, 1, 33)[:count])
    ]


@pytest.mark.parametrize("kind", EXECUTORS)
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "deepseek_v3"])
def test_every_token_but_the_last_has_its_route(tmp_path, make_request, run_engine, kind, family):
    make_moe(tmp_path, family)
    crowd = crowd_of(make_request, 3)
    done = run_engine(engine_with(tmp_path, kind), *crowd)
    for request in crowd:
        check_against_plain(tmp_path, request, done[request.id])


@pytest.mark.parametrize("kind", EXECUTORS)
@pytest.mark.parametrize(
    "settings",
    [{"prefill_tokens": 7}, {"max_running": 2}, {"kv_tokens": 192}],
    ids=["small chunks", "few slots", "preempted"],
)
def test_routes_do_not_depend_on_the_way(moe, make_request, run_engine, kind, settings):
    crowd = crowd_of(make_request)
    engine = engine_with(moe, kind, **settings)
    done = run_engine(engine, *crowd)
    for request in crowd:
        check_against_plain(moe, request, done[request.id])
    assert (engine.counters()["preemptions"] > 0) == ("kv_tokens" in settings)


@pytest.mark.parametrize("kind", EXECUTORS)
def test_blocks_taken_over_bring_their_routes(moe, make_request, run_engine, kind):
    """The second wave finds the prompt's blocks after the first has left them; the fourth member in the same pass."""
    prompt = np.random.default_rng(5).integers(0, VOCAB, 50)
    waves = [[make_request(f"w{w}m{i}", prompt=prompt, seed=10 * w + i) for i in range(4)] for w in range(2)]
    engine = engine_with(moe, kind, max_running=4)
    for wave in waves:
        done = run_engine(engine, *wave)
        for request in wave:
            check_against_plain(moe, request, done[request.id])
    assert engine.counters()["cache_hit_tokens"] >= 7 * 48


def branches_of(root, completion, pivot, num=3):
    """Requests that leave the root after ``pivot`` of its sampled tokens."""
    prompt = np.concatenate([root.prompt_ids, completion.token_ids[:pivot]])
    fork = ForkPoint(request_id=root.id, num_tokens=len(prompt), version=0)
    return [
        replace(root, id=f"b{i}", prompt_ids=prompt, seed=100 + i, hold_s=0.0, fork=fork) for i in range(num)
    ]


@pytest.mark.parametrize("kind", EXECUTORS)
@pytest.mark.parametrize("pivot", [1, 18, 33, 59])
def test_a_branch_has_the_routes_of_what_it_shares_with_its_root(moe, make_request, run_engine, kind, pivot):
    root = replace(make_request("root", prompt=30, max_tokens=60), hold_s=60.0)
    engine = engine_with(moe, kind)
    completion = run_engine(engine, root)["root"]
    family = branches_of(root, completion, pivot)
    done = run_engine(engine, *family)
    num_shared = (30 + pivot - 1) // 16 * 16
    assert engine.counters()["forked_tokens"] == 3 * num_shared
    for request in family:
        routing = check_against_plain(moe, request, done[request.id])
        # Not only the same set: the very rows the root's passes recorded.
        np.testing.assert_array_equal(routing.experts[:num_shared], completion.routing.experts[:num_shared])


@pytest.mark.parametrize("kind", EXECUTORS)
def test_the_last_token_of_a_prompt_has_the_routes_of_the_pass_that_drew_from_it(
    moe, make_request, run_engine, kind
):
    """Not those of another member's pass, which may round to other experts: its block is not shared."""
    group = [make_request(f"g{i}", prompt=np.arange(32) % VOCAB, seed=i, max_tokens=3) for i in range(3)]
    engine = engine_with(moe, kind)
    done = run_engine(engine, *group)
    assert engine.counters()["prefill_tokens"] == 32 + 2 * 16
    for request in group:
        check_against_plain(moe, request, done[request.id])
    engine = engine_with(moe, kind, record_routes=False)
    run_engine(engine, *group)
    assert engine.counters()["prefill_tokens"] == 32 + 2


@pytest.mark.parametrize("kind", EXECUTORS)
def test_a_branch_that_was_sent_back_keeps_the_routes_of_what_it_shared(moe, make_request, run_engine, kind):
    """Memory is so short that branches lose their blocks, and with them those of the root, on the way."""
    root = replace(make_request("root", prompt=30, max_tokens=60), hold_s=60.0)
    engine = engine_with(moe, kind, kv_tokens=192)
    completion = run_engine(engine, root)["root"]
    family, others = branches_of(root, completion, 33), [make_request("o", prompt=60, max_tokens=100)]
    done = run_engine(engine, *family, *others)
    counters = engine.counters()
    assert counters["forks"] == 3 and counters["preemptions"] > 0
    for request in (*family, *others):
        check_against_plain(moe, request, done[request.id])


@pytest.mark.parametrize("kind", EXECUTORS)
def test_a_branch_that_goes_on_elsewhere_takes_the_routes_of_what_it_shared_along(
    moe, make_request, run_engine, kind, tmp_path
):
    """Interrupted after a snapshot or two; the other engine has other weights and none of the root's blocks."""
    root = replace(make_request("root", prompt=30, max_tokens=60), hold_s=60.0)
    engine = engine_with(moe, kind)
    completion = run_engine(engine, root)["root"]
    (branch,) = branches_of(root, completion, 33, num=1)
    engine.submit(branch)
    known = completions.EMPTY
    while known.num_tokens < 12:
        engine.step()
        for _, snapshot in engine.progress(5):
            known = completions.join(known, completions.tail(snapshot, known.num_tokens))
    later = engine_with(moe, kind)
    later.apply(1, list(to_blobs(make_moe(tmp_path, seed=1))))
    whole = run_engine(later, replace(branch, prefix=known))["b0"]
    num_known = 63 + known.num_tokens - 1
    tokens = np.concatenate((branch.prompt_ids, whole.token_ids))
    assert whole.routing.recorded.tolist() == [True] * (len(tokens) - 1) + [False]
    expected = plain_routes(moe, tokens)[:num_known]
    np.testing.assert_array_equal(np.sort(whole.routing.experts, -1)[:num_known], expected)


@pytest.mark.parametrize("kind", EXECUTORS)
def test_snapshots_join_to_the_whole(moe, make_request, kind):
    """Each brings only what is new, also after its sequence was sent back to wait."""
    requests = [make_request(f"r{i}", prompt=n, max_tokens=60) for i, n in enumerate((30, 45, 20))]
    engine = engine_with(moe, kind, kv_tokens=208)
    known = {request.id: completions.EMPTY for request in requests}
    for request in requests:
        engine.submit(request)
    done, num_rows = {}, 0
    while engine.has_work:
        for name, completion in engine.step():
            done[name] = completions.join(known[name], completions.tail(completion, known[name].num_tokens))
            assert np.array_equal(done[name].routing.experts, completion.routing.experts)
            assert np.array_equal(done[name].routing.recorded, completion.routing.recorded)
        for name, snapshot in engine.progress(5):
            num_rows += len(snapshot.routing.experts)
            known[name] = completions.join(known[name], completions.tail(snapshot, known[name].num_tokens))
    assert engine.counters()["preemptions"] > 0
    assert num_rows <= sum(len(c.routing.experts) for c in done.values())
    for request in requests:
        check_against_plain(moe, request, done[request.id])


def test_routes_of_a_pass_on_its_way_are_not_those_of_who_had_the_slot_before(moe, make_request, run_engine):
    engine = engine_with(moe, "device", max_running=1)
    run_engine(engine, make_request("before", prompt=30))
    engine.submit(make_request("next", prompt=40))
    engine.step()
    ((_, nothing),) = engine.abort(["next"])
    assert nothing.num_tokens == 0
    assert nothing.routing is None or not nothing.routing.recorded.any()


@pytest.mark.parametrize("kind", EXECUTORS)
def test_a_resumed_request_keeps_the_routes_it_came_with(moe, make_request, run_engine, kind, tmp_path):
    """Interrupted under one version and resumed under another, on another engine."""
    other = make_moe(tmp_path, seed=1)
    request = make_request("a", prompt=20, max_tokens=30)
    engine = engine_with(moe, kind)
    engine.submit(request)
    while not any(c.num_tokens >= 10 for _, c in engine.progress()):
        engine.step()
    ((_, first),) = engine.abort(["a"])
    later = engine_with(moe, kind)
    later.apply(1, list(to_blobs(other)))
    whole = run_engine(later, replace(request, prefix=first))["a"]
    num_known = 20 + first.num_tokens - 1
    tokens = np.concatenate((request.prompt_ids, whole.token_ids))
    assert whole.routing.recorded.tolist() == [True] * (len(tokens) - 1) + [False]
    got = np.sort(whole.routing.experts, -1)
    np.testing.assert_array_equal(got[:num_known], plain_routes(moe, tokens)[:num_known])
    after = plain_routes(tmp_path, tokens)
    np.testing.assert_array_equal(got[num_known:], after[num_known:-1])
    assert not np.array_equal(got[:num_known], after[:num_known])


@pytest.mark.parametrize("kind", EXECUTORS)
def test_keys_that_are_computed_anew_keep_their_first_routes(moe, make_request, kind, tmp_path):
    other = make_moe(tmp_path, seed=1)
    request = make_request("a", prompt=20, max_tokens=30)
    engine = engine_with(moe, kind, recompute_kv=True)
    engine.submit(request)
    while not any(c.num_tokens >= 10 for _, c in engine.progress()):
        engine.step()
    engine.apply(1, list(to_blobs(other)))
    done = {}
    while engine.has_work:
        done.update(engine.step())
    tokens = np.concatenate((request.prompt_ids, done["a"].token_ids))
    num_old = 20 + int(np.count_nonzero(done["a"].versions == 0)) - 1
    got = np.sort(done["a"].routing.experts, -1)
    np.testing.assert_array_equal(got[:num_old], plain_routes(moe, tokens)[:num_old])
    np.testing.assert_array_equal(got[num_old:], plain_routes(tmp_path, tokens)[num_old:-1])


def test_a_prefix_without_routes_gets_those_of_the_pass_that_computes_it(moe, make_request, run_engine):
    request = make_request("a", prompt=20, max_tokens=12)
    whole = run_engine(engine_with(moe, record_routes=False), request)["a"]
    assert whole.routing is None
    first = replace(
        whole,
        token_ids=whole.token_ids[:5],
        logprobs=whole.logprobs[:5],
        versions=whole.versions[:5],
        finish_reason="abort",
    )
    done = run_engine(engine_with(moe), replace(request, prefix=first))["a"]
    check_against_plain(moe, request, done)


def test_an_engine_that_records_nothing_hands_on_what_it_was_given(moe, make_request, run_engine):
    request = make_request("a", prompt=20, max_tokens=12)
    whole = run_engine(engine_with(moe), request)["a"]
    first = completions.tail(whole, 0)
    first = replace(
        first,
        token_ids=whole.token_ids[:5],
        logprobs=whole.logprobs[:5],
        versions=whole.versions[:5],
        finish_reason="abort",
        routing=replace(whole.routing, experts=whole.routing.experts[:24], recorded=np.arange(25) < 24),
    )
    done = run_engine(engine_with(moe, record_routes=False), replace(request, prefix=first))["a"]
    assert done.routing.recorded.tolist() == [True] * 24 + [False] * 8
    np.testing.assert_array_equal(done.routing.experts, whole.routing.experts[:24])


def test_a_prefix_with_routes_of_another_model_is_refused_alone(moe, make_request, run_engine):
    request, other = make_request("a", prompt=20, max_tokens=12), make_request("b", prompt=20)
    whole = run_engine(engine_with(moe), request)["a"]
    shallow = replace(whole.routing, experts=whole.routing.experts[:, :2])
    engine = engine_with(moe)
    engine.submit(other)
    with pytest.raises(RecordError, match="2 layers and the model has 3"):
        engine.submit(replace(request, prefix=replace(whole, finish_reason="abort", routing=shallow)))
    too_long = replace(whole.routing, recorded=np.append(np.zeros(9, bool), whole.routing.recorded))
    with pytest.raises(RecordError, match="41 tokens and there are 32"):
        engine.submit(replace(request, prefix=replace(whole, finish_reason="abort", routing=too_long)))
    check_against_plain(moe, other, run_engine(engine)["b"])


@pytest.mark.parametrize("kind", EXECUTORS)
def test_dense_models_record_nothing(tiny_checkpoint, make_request, run_engine, kind):
    done = run_engine(engine_with(tiny_checkpoint, kind), make_request("a"))
    assert done["a"].routing is None


@pytest.mark.parametrize("kind", EXECUTORS)
def test_more_experts_than_a_byte_holds(tmp_path, make_request, run_engine, kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    make_moe(tmp_path, num_layers=1)
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_experts, config.moe_intermediate_size = 300, 8
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    request = make_request("a", prompt=40)
    routing = check_against_plain(tmp_path, request, run_engine(engine_with(tmp_path, kind), request)["a"])
    assert routing.experts.dtype == np.uint16
    assert routing.experts.max() > 255


def test_scoring_leaves_recorded_routes_alone(moe, make_request, run_engine):
    request = make_request("a", prompt=20, max_tokens=12)
    engine = engine_with(moe)
    engine.submit(request)
    done = {}
    while engine.has_work:
        engine.score([np.arange(30) % VOCAB])
        done.update(engine.step())
    check_against_plain(moe, request, done["a"])


def test_routers_of_another_kind_are_refused(tmp_path):
    model = make_moe(tmp_path)
    assert RouteRecorder(model, 8, model.device).shape == RouterShape(3, 4, 2)
    strange = make_moe(tmp_path)
    for router in routers(strange).values():
        del router.norm_topk_prob
    with pytest.raises(ModelError, match=r"algo\.routing to live"):
        RouteRecorder(strange, 8, strange.device)


def test_recording_is_part_of_the_one_compiled_layer(moe):
    """It neither breaks the graph nor tells layers apart."""
    from torch._dynamo.testing import CompileCounter

    from headrace.engines.device_model import DeviceModel, _Probe

    torch._dynamo.reset()
    model = DeviceModel(load_model(moe), compiled=False, routed_rows=64)
    counter = CompileCounter()
    for layer in model._model.base_model.layers:
        layer.compile(backend=counter, dynamic=True, fullgraph=True)
    recorded = []
    for length in (8, 13):
        ids_T = torch.arange(length)
        model.logits(ids_T, ids_T, _Probe(3))
        recorded.append(model.recorder.rows(length).sort(-1).values.numpy())
    assert counter.frame_count == 1
    for length, rows in zip((8, 13), recorded, strict=True):
        np.testing.assert_array_equal(rows, plain_routes(moe, np.arange(length)))
