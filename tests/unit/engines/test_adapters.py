"""Several adapters on one engine: each request computed with its own, versions apart, caches apart."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from headrace.engines.driver import EngineDriver
from headrace.engines.make import torch_engine
from headrace.engines.torch_engine import TorchEngine
from headrace.errors import TaskError, WeightSyncError
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.lora import LoraSpec, target_linears
from headrace.models.tensors import blobs_of, to_blobs
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import WeightManifest

SPEC = LoraSpec(rank=4, alpha=8.0)
DORA = LoraSpec(rank=4, alpha=8.0, dora=True)
LENGTHS = (3, 40, 17, 90, 1, 33, 65, 12)


def adapter(model, *, seed, rank=4, scaling=2.0, targets=("all-linear",), dora=False, size=0.15):
    """Random tensors as a trainer would publish them."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return size * torch.randn(shape, generator=generator)

    tensors = {"scaling": torch.tensor([scaling])}
    for name in target_linears(model, targets):
        num_out, num_in = model.get_submodule(name).weight.shape
        tensors |= {
            f"{name}.lora_A.weight": random(rank, num_in),
            f"{name}.lora_B.weight": random(num_out, rank),
        }
        if dora:
            tensors[f"{name}.row_factor"] = 1 + random(num_out)
    return tensors


def merged(checkpoint, tensors):
    """The model with the adapter in its weights."""
    model = load_model(checkpoint)
    with torch.no_grad():
        for name in [n.removesuffix(".lora_A.weight") for n in tensors if n.endswith("lora_A.weight")]:
            weight, a, b = (
                model.get_submodule(name).weight,
                tensors[f"{name}.lora_A.weight"],
                tensors[f"{name}.lora_B.weight"],
            )
            weight += tensors["scaling"] * b @ a
            if f"{name}.row_factor" in tensors:
                weight *= tensors[f"{name}.row_factor"][:, None]
    return model


@pytest.fixture
def weights(tiny_checkpoint):
    model = load_model(tiny_checkpoint)
    return lambda **options: adapter(model, **options)


@pytest.fixture(params=["plain", "device"])
def make_adapter_engine(request, make_engine, make_device_engine):
    def build(num_adapters=2, lora=SPEC, **settings):
        make = make_engine if request.param == "plain" else make_device_engine
        return make(lora=lora, num_adapters=num_adapters, **settings)

    return build


@pytest.fixture
def make_policy_request(make_request):
    def build(name, policy, **options):
        from dataclasses import replace

        return replace(make_request(name, **options), policy=policy)

    return build


def close(a, b):
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_rows_of_a_pass_have_adapters_of_their_own(
    tiny_checkpoint, make_adapter_engine, make_policy_request, run_engine, weights, dora
):
    """Mixed in every pass, each request is computed as by an engine with its adapter merged into the weights."""
    tensors = {"a": weights(seed=1, dora=dora), "b": weights(seed=2, rank=2, scaling=0.5, dora=dora)}
    engine = make_adapter_engine(lora=DORA if dora else SPEC)
    for name, own in tensors.items():
        engine.apply_adapter(name, 3, blobs_of(own))
    policies = ["a", "b", "base"]
    crowd = [
        make_policy_request(f"r{i}", policies[i % 3], prompt=n, max_tokens=15 + 3 * i)
        for i, n in enumerate(LENGTHS)
    ]
    together = run_engine(engine, *crowd)
    for policy in policies:
        model = merged(tiny_checkpoint, tensors.get(policy, {}))
        alone = torch_engine(model, ledger=TimeLedger(ENGINE_ACTIVITIES))
        own = [
            make_policy_request(r.id, "policy", prompt=len(r.prompt_ids), max_tokens=r.sampling.max_tokens)
            for r in crowd
            if r.policy == policy
        ]
        for name, completion in run_engine(alone, *own).items():
            close(together[name], completion)
            expected = 0 if policy == "base" else 3
            assert set(together[name].versions) == {expected} == set(together[name].kv_versions[:, 0])
        ids = [np.random.default_rng(n).integers(0, 61, n) for n in (2, 30)]
        for got, wanted in zip(engine.score(ids, policy=policy), alone.score(ids), strict=True):
            np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_bits_do_not_depend_on_the_other_adapters_company(
    make_engine, make_policy_request, run_engine, same_bits, weights
):
    crowd = [
        make_policy_request(f"r{i}", "ab"[i % 2], prompt=n, max_tokens=15 + 9 * i)
        for i, n in enumerate(LENGTHS)
    ]
    together, alone = (make_engine(lora=SPEC, num_adapters=2) for _ in range(2))
    for engine in (together, alone):
        for seed, name in enumerate("ab"):
            engine.apply_adapter(name, 0, blobs_of(weights(seed=seed)))
    results = run_engine(together, *crowd)
    for request in crowd:
        assert same_bits(run_engine(alone, request)[request.id], results[request.id])


def test_an_update_of_one_leaves_the_other_as_it_was(
    make_adapter_engine, make_policy_request, run_engine, same_bits, weights
):
    """Updated in the middle of decoding: b's tokens, versions and blocks are those of an engine where a rests."""

    def requests():
        return [make_policy_request(f"{p}{i}", p, prompt=40, max_tokens=30) for p in "ab" for i in range(3)]

    def run(updating):
        engine = make_adapter_engine()
        for seed, name in enumerate("ab"):
            engine.apply_adapter(name, 0, blobs_of(weights(seed=seed)))
        for request in requests():
            engine.submit(request)
        done, step = {}, 0
        while engine.has_work:
            done.update(engine.step())
            step += 1
            if updating and step % 7 == 0:
                engine.apply_adapter("a", step, blobs_of(weights(seed=100 + step)))
        return done, engine

    (resting, _), (updated, engine) = run(False), run(True)
    assert all(same_bits(resting[f"b{i}"], updated[f"b{i}"]) for i in range(3))
    assert all(set(updated[f"b{i}"].versions) == {0} for i in range(3))
    assert not any(same_bits(resting[f"a{i}"], updated[f"a{i}"]) for i in range(3))
    assert len(set(updated["a0"].versions)) > 2
    assert engine.version_of("b") == 0 and engine.version_of("a") > 0


def test_rows_too_long_for_a_dense_copy_keep_their_adapters(
    make_engine, make_policy_request, run_engine, same_bits, weights, monkeypatch
):
    crowd = [
        make_policy_request(f"r{i}", "ab"[i % 2], prompt=n, max_tokens=15 + 3 * i)
        for i, n in enumerate(LENGTHS)
    ]
    done = []
    for resident_bytes in (None, 0):
        if resident_bytes is not None:
            monkeypatch.setattr("headrace.engines.plain_executor.RESIDENT_BYTES", resident_bytes)
        engine = make_engine(lora=SPEC, num_adapters=2)
        for seed, name in enumerate("ab"):
            engine.apply_adapter(name, 1, blobs_of(weights(seed=seed)))
        done.append(run_engine(engine, *crowd))
    assert all(same_bits(done[0][r.id], done[1][r.id]) for r in crowd)


def test_keys_are_computed_anew_for_the_policy_whose_adapter_changed(
    make_engine, make_policy_request, run_engine, weights
):
    engine = make_engine(lora=SPEC, num_adapters=2, recompute_kv=True)
    for seed, name in enumerate("ab"):
        engine.apply_adapter(name, 1, blobs_of(weights(seed=seed)))
        engine.submit(make_policy_request(name, name, max_tokens=10))
    for _ in range(4):
        engine.step()
    engine.apply_adapter("a", 2, blobs_of(weights(seed=2)))
    done = run_engine(engine)
    assert engine.counters()["preemptions"] == 1
    assert {name: completion.kv_versions.tolist() for name, completion in done.items()} == {
        "a": [[2, 21]],
        "b": [[1, 21]],
    }


def test_a_policy_refuses_what_is_older_than_its_own_adapter(make_engine, weights):
    """Whatever versions the others have."""
    ledger = TimeLedger(ENGINE_ACTIVITIES)
    core = make_engine(lora=SPEC, num_adapters=2)
    for name, version in (("a", 3), ("b", 1)):
        core.apply_adapter(name, version, blobs_of(weights(seed=version)))
    driver = EngineDriver(core, Bundles(list(blobs_of(weights(seed=2)))), ledger=ledger)

    def manifest(policy):
        return WeightManifest(
            version=2, base_version=None, kind="adapter", transport="memory", location="", num_bytes=0, digest="",
            slots=(), policy=policy,
        )  # fmt: skip

    async def main():
        with pytest.raises(WeightSyncError, match="has version 3; 2 is older"):
            await driver.apply(manifest("a"))
        assert await driver.apply(manifest("b")) == 2
        await driver.close()

    asyncio.run(main())
    assert (core.version_of("a"), core.version_of("b")) == (3, 2)


class Bundles:
    """Hands out the same tensors for every update."""

    def __init__(self, blobs):
        self._blobs = blobs

    def receive(self, manifest, base=()):
        return self._blobs

    def close(self): ...


def test_prefixes_are_shared_within_an_adapter_and_version_only(
    make_adapter_engine, make_policy_request, run_engine, weights
):
    prompt = np.arange(50) % 61
    engine = make_adapter_engine()
    for seed, name in enumerate("ab"):
        engine.apply_adapter(name, 0, blobs_of(weights(seed=seed)))
    hits = []

    def ask(name, policy):
        before = engine.counters()["cache_hit_tokens"]
        run_engine(engine, make_policy_request(name, policy, prompt=prompt, max_tokens=2))
        hits.append(engine.counters()["cache_hit_tokens"] - before)

    for name, policy in (("1", "a"), ("2", "a"), ("3", "b"), ("4", "base"), ("5", "b"), ("6", "base")):
        ask(name, policy)
    assert hits == [0, 48, 0, 0, 48, 48]
    engine.apply_adapter("a", 1, blobs_of(weights(seed=7)))
    for name, policy in (("7", "a"), ("8", "a"), ("9", "b"), ("10", "base")):
        ask(name, policy)
    assert hits[6:] == [0, 48, 48, 48]


def test_a_smaller_or_narrower_adapter_leaves_nothing_of_the_last_one(
    tiny_checkpoint, make_adapter_engine, weights
):
    engine = make_adapter_engine(num_adapters=1, lora=DORA)
    engine.apply_adapter("a", 0, blobs_of(weights(seed=1, dora=True)))
    small = weights(seed=2, rank=1, targets=("q_proj", "up_proj"))
    engine.apply_adapter("a", 1, blobs_of(small))
    alone = torch_engine(merged(tiny_checkpoint, small), ledger=TimeLedger(ENGINE_ACTIVITIES))
    ids = [np.arange(30)]
    np.testing.assert_allclose(engine.score(ids, policy="a")[0], alone.score(ids)[0], atol=2e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("scaling"),
        lambda t: t.pop("model.layers.0.mlp.up_proj.lora_B.weight"),
        lambda t: t.update({"model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(5, 64)}),
        lambda t: t.update({"model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)}),
        lambda t: t.update({"model.layers.0.mlp.up_proj.row_factor": torch.zeros(256)}),
        lambda t: t.update({"model.layers.0.mlp.up_proj.lora_B.weight": torch.zeros(256, 4).bfloat16()}),
        lambda t: t.clear(),
    ],
    ids=["no scaling", "no B", "rank", "layer", "dora", "dtype", "empty"],
)
def test_an_adapter_that_does_not_fit_changes_nothing(make_adapter_engine, weights, change):
    engine = make_adapter_engine()
    engine.apply_adapter("a", 4, blobs_of(weights(seed=1)))
    ids = [np.arange(20)]
    before = engine.score(ids, policy="a")[0]
    wrong = weights(seed=2)
    change(wrong)
    with pytest.raises(WeightSyncError, match="lora settings"):
        engine.apply_adapter("a", 5, blobs_of(wrong))
    assert engine.version_of("a") == 4
    assert np.array_equal(engine.score(ids, policy="a")[0], before)


def test_who_is_not_there_is_refused_by_name(
    make_engine, make_adapter_engine, make_policy_request, weights, tiny_checkpoint
):
    engine = make_adapter_engine(num_adapters=1)
    with pytest.raises(TaskError, match="'policy' has no adapter"):
        engine.submit(make_policy_request("1", "policy"))
    engine.apply_adapter("a", 0, blobs_of(weights(seed=1)))
    with pytest.raises(WeightSyncError, match=r"no room .* 'b'.*1 \(a\)"):
        engine.apply_adapter("b", 0, blobs_of(weights(seed=1)))
    with pytest.raises(WeightSyncError, match="model must stay"):
        engine.apply(1, to_blobs(load_model(tiny_checkpoint)))
    plain = make_engine()
    with pytest.raises(TaskError, match="'a' has no adapter"):
        plain.submit(make_policy_request("1", "a"))
    with pytest.raises(WeightSyncError, match="no room"):
        plain.apply_adapter("a", 0, blobs_of(weights(seed=1)))


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_families_with_biases_and_experts(
    tmp_path, make_device_engine, make_policy_request, run_engine, family, dora
):
    make_tiny_model(
        tmp_path, family=family, vocab_size=61, num_kv_heads=2, init_std=0.12, tie_embeddings=False
    )
    if family == "qwen2":
        model = load_model(tmp_path)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
        model.save_pretrained(tmp_path)
    tensors = adapter(load_model(tmp_path), seed=1, dora=dora)
    spec = DORA if dora else SPEC
    engines: list[TorchEngine] = [
        make_device_engine(tmp_path, lora=spec),
        torch_engine(load_model(tmp_path), ledger=TimeLedger(ENGINE_ACTIVITIES), lora=spec),
    ]
    crowd = [make_policy_request(f"f{i}", "a", prompt=n, max_tokens=12) for i, n in enumerate((5, 60, 33))]
    alone = torch_engine(merged(tmp_path, tensors), ledger=TimeLedger(ENGINE_ACTIVITIES))
    expected = run_engine(
        alone, *(make_policy_request(r.id, "policy", prompt=r.prompt_ids, max_tokens=12) for r in crowd)
    )
    for engine in engines:
        engine.apply_adapter("a", 0, blobs_of(tensors))
        for name, completion in run_engine(engine, *crowd).items():
            close(completion, expected[name])


def test_layers_with_adapters_are_one_compiled_piece_of_code(tiny_checkpoint):
    """Neither the adapters nor the rows that have them are part of the code."""
    from torch._dynamo.testing import CompileCounter

    from headrace.engines.device_model import DeviceModel, _Probe

    torch._dynamo.reset()
    model = DeviceModel(load_model(tiny_checkpoint), compiled=False, lora=DORA, num_adapters=2)
    tensors = adapter(load_model(tiny_checkpoint), seed=1, dora=True)
    model.bank.load(1, blobs_of(tensors))

    def logits(num_rows, adapters):
        ids = torch.arange(num_rows)
        return model.logits(ids, ids, _Probe(len(model.layers)), adapters_T=adapters)

    cases = [
        (9, torch.arange(9) % 3),
        (8, torch.zeros(8, dtype=torch.int64)),
        (33, None),
        (12, torch.ones(12).long()),
    ]
    expected = [logits(*case).clone() for case in cases]
    counter = CompileCounter()
    for layer in model._model.base_model.layers:
        layer.compile(backend=counter, dynamic=True, fullgraph=True)
    for case, wanted in zip(cases, expected, strict=True):
        torch.testing.assert_close(logits(*case), wanted)
    assert counter.frame_count == 1
