"""Adapters of fused experts on an engine: each row computed with its own, as the trainer computes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.data.packing import pack
from headrace.engines.make import torch_engine
from headrace.errors import WeightSyncError
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.lora import LoraSpec, target_experts, target_linears
from headrace.models.tensors import blobs_of, named_tensors
from headrace.timekeeping import ENGINE_ACTIVITIES, TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.forward_check import probe_sample
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.trainers.torch_trainer import TorchTrainer

TARGETS = ("all-linear", "experts")
SPEC = LoraSpec(rank=4, alpha=8.0, targets=TARGETS)
LENGTHS = (3, 40, 17, 90, 1, 33)


@pytest.fixture(params=["qwen3_moe", "olmoe"])
def mixture(request, tmp_path):
    options = {"vocab_size": 61, "num_kv_heads": 2, "context_tokens": 256, "tie_embeddings": False}
    make_tiny_model(tmp_path, family=request.param, init_std=0.12, **options)
    return tmp_path


@pytest.fixture(params=["plain", "device"])
def make_mixture_engine(request, mixture, make_device_engine):
    def build(lora=SPEC, **settings):
        if request.param == "device":
            return make_device_engine(mixture, lora=lora, **settings)
        ledger = TimeLedger(ENGINE_ACTIVITIES)
        return torch_engine(load_model(mixture), ledger=ledger, lora=lora, **settings)

    return build


@pytest.fixture
def adapter(mixture):
    """Random tensors as a trainer would publish them."""
    model = load_model(mixture)

    def build(*, seed, rank=4, scaling=2.0, targets=TARGETS):
        generator = torch.Generator().manual_seed(seed)
        shapes = {name: model.get_submodule(name).weight.shape for name in target_linears(model, targets)}
        shapes |= {
            name: model.get_parameter(name).shape for name in target_experts(model, targets, dora=False)
        }
        tensors = {"scaling": torch.tensor([scaling])}
        for name, (*experts, num_out, num_in) in shapes.items():
            tensors[f"{name}.lora_A.weight"] = 0.15 * torch.randn(
                (*experts, rank, num_in), generator=generator
            )
            tensors[f"{name}.lora_B.weight"] = 0.15 * torch.randn(
                (*experts, num_out, rank), generator=generator
            )
        return tensors

    return build


@pytest.fixture
def completions_alone(mixture, make_request, run_engine):
    """What an engine gives whose model has the adapter in its weights."""

    def run(tensors, requests):
        model = load_model(mixture)
        weights = named_tensors(model)
        with torch.no_grad():
            for name in [n.removesuffix(".lora_A.weight") for n in tensors if n.endswith("lora_A.weight")]:
                weight = weights.get(name, weights.get(f"{name}.weight"))
                a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
                weight += tensors["scaling"] * b @ a
        engine = torch_engine(model, ledger=TimeLedger(ENGINE_ACTIVITIES))
        return run_engine(engine, *(replace(request, policy="policy") for request in requests))

    return run


@pytest.fixture
def crowd(make_request):
    def build(*policies):
        return [
            replace(
                make_request(f"r{i}", prompt=n, max_tokens=12 + 2 * i), policy=policies[i % len(policies)]
            )
            for i, n in enumerate(LENGTHS)
        ]

    return build


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, completion in expected.items():
        np.testing.assert_array_equal(found[name].token_ids, completion.token_ids)
        np.testing.assert_allclose(found[name].logprobs, completion.logprobs, atol=1e-5)


def test_rows_of_a_pass_have_adapters_of_their_own(
    make_mixture_engine, adapter, crowd, completions_alone, run_engine
):
    """One of full rank everywhere, one smaller in the experts' second product alone, and rows without any."""
    tensors = {
        "a": adapter(seed=1),
        "b": adapter(seed=2, rank=3, scaling=0.7, targets=("down_proj",)),
        "base": {},
    }
    engine = make_mixture_engine(num_adapters=2)
    for name in ("a", "b"):
        engine.apply_adapter(name, 3, blobs_of(tensors[name]))
    requests = crowd("a", "b", "base")
    together = run_engine(engine, *requests)
    for policy, own in tensors.items():
        mine = [request for request in requests if request.policy == policy]
        close({r.id: together[r.id] for r in mine}, completions_alone(own, mine))
        for request in mine:
            assert set(together[request.id].versions) == {0 if policy == "base" else 3}


def test_an_update_replaces_the_adapter_and_its_cached_prefixes(
    make_mixture_engine, adapter, crowd, completions_alone, run_engine
):
    engine, requests = make_mixture_engine(num_adapters=2), crowd("a")
    other = [replace(request, policy="b") for request in requests]
    engine.apply_adapter("a", 0, blobs_of(adapter(seed=1)))
    engine.apply_adapter("b", 0, blobs_of(adapter(seed=2)))
    before = run_engine(engine, *other)
    run_engine(engine, *requests)
    new = adapter(seed=3, rank=2, targets=("gate_up_proj",))
    engine.apply_adapter("a", 1, blobs_of(new))
    after = run_engine(engine, *requests)
    close(after, completions_alone(new, requests))
    assert all(set(completion.versions) == {1} for completion in after.values())
    close(run_engine(engine, *other), before)


def test_an_engine_computes_what_the_trainer_does(mixture, make_mixture_engine, crowd, run_engine):
    """Whatever the trainer publishes, log-probabilities are its own, sampled or scored."""
    trainer = TorchTrainer(load_model(mixture), sender=None, ledger=TimeLedger(TRAINER_ACTIVITIES), lora=SPEC)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    engine = make_mixture_engine()
    engine.apply_adapter("policy", 0, trainer._weights.blobs())
    requests = crowd("policy")
    for request in requests:
        completion = run_engine(engine, request)[request.id]
        ids = np.concatenate([request.prompt_ids, completion.token_ids])
        (row,) = pack([probe_sample(ids)], row_tokens=len(ids))
        with torch.no_grad():
            expected = token_logprobs(trainer.policy, row_tensors(row, device="cpu"))[0].numpy()
        np.testing.assert_allclose(completion.logprobs, expected[-len(completion.token_ids) :], atol=1e-5)
        (scored,) = engine.score([ids], policy="policy")
        np.testing.assert_allclose(scored[-len(expected) :], expected, atol=1e-5)


def test_one_that_does_not_fit_is_refused_and_the_old_goes_on(
    make_mixture_engine, adapter, crowd, run_engine
):
    engine, requests = make_mixture_engine(), crowd("a")
    engine.apply_adapter("a", 0, blobs_of(adapter(seed=1)))
    before = run_engine(engine, *requests)
    flat = adapter(seed=2)
    name = next(name for name in flat if name.endswith("experts.down_proj.lora_A.weight"))
    for wrong in (
        adapter(seed=2, rank=5),
        flat | {name: flat[name][0]},
        flat | {name: flat[name][:3].contiguous()},
        flat | {name: flat[name].flatten()},
    ):
        with pytest.raises(WeightSyncError, match="lora settings"):
            engine.apply_adapter("a", 1, blobs_of(wrong))
    close(run_engine(engine, *requests), before)
    without = make_mixture_engine(lora=replace(SPEC, targets=("all-linear",)))
    with pytest.raises(WeightSyncError, match="lora settings"):
        without.apply_adapter("a", 0, blobs_of(adapter(seed=1)))


def test_what_an_engine_computes_with_can_be_read_back(make_mixture_engine, adapter):
    engine, tensors = make_mixture_engine(num_adapters=2), adapter(seed=4)
    engine.apply_adapter("a", 0, blobs_of(adapter(seed=1)))
    engine.apply_adapter("b", 0, blobs_of(tensors))
    found = {blob.name: blob for blob in engine.weights((), policy="b")}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        values = np.asarray(found[name].data).view(np.float32).reshape(found[name].shape)
        np.testing.assert_array_equal(values, tensor.numpy())


def test_experts_with_adapters_are_one_compiled_piece_of_code(mixture, adapter):
    """Neither the adapters nor the rows that have them are part of the code."""
    from torch._dynamo.testing import CompileCounter

    from headrace.engines.device_model import DeviceModel, _Probe

    torch._dynamo.reset()
    model = DeviceModel(load_model(mixture), compiled=False, lora=SPEC, num_adapters=2)
    model.bank.load(1, blobs_of(adapter(seed=1)))

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
