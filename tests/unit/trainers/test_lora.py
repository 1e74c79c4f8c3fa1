"""Adapters in the trainer: their gradients, what stays frozen, what is written, sent and referred to."""

from __future__ import annotations

import json

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file

from headrace.data.packing import pack
from headrace.errors import CheckpointError, ConfigError, TrainingError
from headrace.models.lora import LoraSpec
from headrace.models.tensors import named_tensors
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.forward_check import plain_logprobs, probe_sample
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.trainers.torch_trainer import TorchTrainer

SPEC = LoraSpec(rank=4, alpha=8.0)
IDS = np.random.default_rng(5).integers(0, 32, 19)


@pytest.fixture
def make_trainer(make_model, sender):
    def make(spec=SPEC, *, model=None, **settings):
        return TorchTrainer(
            make_model() if model is None else model,
            sender=sender,
            ledger=TimeLedger(TRAINER_ACTIVITIES),
            **{"learning_rate": 1e-2, **settings},
            lora=spec,
        )

    return make


def stir(trainer, seed=3):
    """Give B and the magnitudes values that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_A" not in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    trainer._weights.refresh()


def policy_logprobs(trainer, ids=IDS):
    with torch.no_grad():
        (row,) = pack([probe_sample(ids)], row_tokens=len(ids))
        return token_logprobs(trainer.policy, row_tensors(row, device="cpu"))[0]


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj")], ids=["all", "two"])
def test_only_the_adapter_moves_and_the_trainer_begins_as_the_model(
    make_model, make_trainer, make_batch, dora, targets
):
    before = {name: tensor.clone() for name, tensor in named_tensors(make_model()).items()}
    trainer = make_trainer(LoraSpec(rank=4, alpha=8.0, targets=targets, dora=dora))
    with torch.no_grad():
        torch.testing.assert_close(policy_logprobs(trainer), plain_logprobs(make_model(), IDS))
    trainer.step(make_batch(1))
    after = {
        n.replace(".base_layer", ""): t for n, t in trainer.policy.state_dict().items() if "lora_" not in n
    }
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    num_layers = 2 * (7 if targets == ("all-linear",) else 2)
    trained = dict(trainer.model.named_parameters())
    assert len(trained) == num_layers * (3 if dora else 2)
    assert {p for group in trainer.optimizer.param_groups for p in group["params"]} == set(trained.values())
    with torch.no_grad():
        assert float((policy_logprobs(trainer) - plain_logprobs(make_model(), IDS)).abs().max()) > 1e-4


def test_gradients_are_those_of_the_merged_weights(make_model, make_trainer, make_batch):
    """dL/dA = s B' G and dL/dB = s G A', with G the gradient of the weight W + s B A."""
    trainer, batch = make_trainer(), make_batch(1)
    stir(trainer)
    merged = make_model()
    layers = {
        name: trainer.policy.get_submodule(name)
        for name, module in merged.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    with torch.no_grad():
        for name, layer in layers.items():
            merged.get_submodule(name).weight += (
                SPEC.scaling * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            )
    full = TorchTrainer(merged, sender=None, ledger=TimeLedger(TRAINER_ACTIVITIES))
    for each in (trainer, full):
        (rows,) = each.prepare(batch)
        each.accumulate(rows, before_update=True)
    for name, layer in layers.items():
        g = merged.get_submodule(name).weight.grad
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        torch.testing.assert_close(a.grad, SPEC.scaling * b.T @ g, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(b.grad, SPEC.scaling * g @ a.T, atol=1e-6, rtol=1e-4)


def test_shared_prefixes_give_the_same_step(make_trainer, make_batch):
    trainers = [make_trainer(share_prefixes=share) for share in (False, True)]
    results = [trainer.step(make_batch(1)) for trainer in trainers]
    assert results[0].metrics["grad_norm"] == pytest.approx(results[1].metrics["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_loads_with_peft_and_resumes(
    make_model, make_trainer, make_batch, tmp_path, dora, dtype
):
    spec = LoraSpec(rank=4, alpha=6.0, dora=dora)
    base = make_model()
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    trainer = make_trainer(spec, model=base, compute_dtype=dtype)
    for step in (1, 2):
        trainer.step(make_batch(step))
    saved = tmp_path / "saved"
    saved.mkdir()
    trainer.save(saved)
    assert not (saved / "model.safetensors").exists()
    assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "base"
    )
    again = make_trainer(spec, compute_dtype=dtype)
    assert again.load(saved) == 2
    assert torch.equal(policy_logprobs(again), policy_logprobs(trainer))
    results = [each.step(make_batch(3)).metrics["grad_norm"] for each in (trainer, again)]
    assert results[0] == results[1]
    assert torch.equal(policy_logprobs(again), policy_logprobs(trainer))
    if dtype == "fp32":
        loaded = peft.PeftModel.from_pretrained(make_model(), saved).eval()
        expected = make_trainer(spec)
        expected.load(saved)
        with torch.no_grad():
            torch.testing.assert_close(plain_logprobs(loaded, IDS), policy_logprobs(expected))


def test_a_checkpoint_of_another_rank_is_refused(make_trainer, tmp_path):
    make_trainer().save(tmp_path)
    with pytest.raises(CheckpointError, match="lora settings"):
        make_trainer(LoraSpec(rank=2, alpha=8.0)).load(tmp_path)


def test_in_bf16_the_adapter_has_float32_masters_and_the_model_none(make_trainer, make_batch):
    trainer = make_trainer(compute_dtype="bf16")
    assert {p.dtype for p in trainer.policy.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert trainer.policy.model.rotary_emb.inv_freq.dtype == torch.float32
    trainer.step(make_batch(1))
    masters, live = dict(trainer.model.named_parameters()), dict(trainer.policy.named_parameters())
    assert all(torch.equal(live[name], master.bfloat16()) for name, master in masters.items())
    assert all(p.grad is None for p in trainer.policy.parameters())


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_the_reference_is_the_model_without_the_adapter(make_model, make_trainer, make_batch, dora):
    trainer = make_trainer(LoraSpec(rank=4, alpha=8.0, dora=dora), kl="k3", kl_coef=0.1)
    stir(trainer)
    full = TorchTrainer(
        make_model(), sender=None, ledger=TimeLedger(TRAINER_ACTIVITIES), kl="k3", kl_coef=0.1
    )
    (rows,), (expected,) = trainer.prepare(make_batch(1)), full.prepare(make_batch(1))
    for row, other in zip(rows, expected, strict=True):
        torch.testing.assert_close(row.inputs.ref_logprobs_N, other.inputs.ref_logprobs_N)
    result = trainer.step(make_batch(1))
    assert result.skipped is None and result.metrics["grad_norm"] > 0


def test_an_adapter_is_published_in_its_own_bytes(make_trainer, make_batch, sender):
    trainer = make_trainer(LoraSpec(rank=4, alpha=8.0, policy="solver"))
    manifest = trainer.publish(0)
    assert (manifest.kind, manifest.policy, manifest.base_version) == ("adapter", "solver", None)
    own = sum(4 * p.numel() for p in trainer.model.parameters())
    assert own < manifest.num_bytes <= 1.01 * own
    a = sender.sent[0]["model.layers.1.mlp.up_proj.lora_A.weight"]
    assert a.shape == (4, 32)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_adapter_that_is_not_finite_is_never_published(make_trainer, dtype):
    trainer = make_trainer(compute_dtype=dtype)
    assert trainer.publish(0).kind == "adapter"
    with torch.no_grad():
        next(iter(trainer.model.parameters()))[0, 0] = torch.inf
    trainer._weights.refresh()
    with pytest.raises(TrainingError, match="not finite"):
        trainer.publish(0)


def test_the_adapter_begins_the_same_whatever_was_drawn_before(make_trainer):
    first = make_trainer()
    torch.rand(7)
    second, other = make_trainer(), make_trainer(LoraSpec(rank=4, alpha=8.0, seed=1))
    a, b, c = (dict(t.model.named_parameters()) for t in (first, second, other))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_a_target_that_is_nowhere_is_named(make_trainer):
    with pytest.raises(ConfigError, match=r"lora.targets.*'w_proj'.*down_proj"):
        make_trainer(LoraSpec(rank=4, alpha=8.0, targets=("w_proj",)))
    with pytest.raises(ConfigError, match="lm_head"):
        make_trainer(LoraSpec(rank=4, alpha=8.0, targets=("lm_head",)))


def test_layers_with_adapters_compile_as_one_piece_of_code(make_trainer):
    """One with the adapter and one without: peft's layers neither break the graph nor tell layers apart."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    trainer = make_trainer()
    counter = CompileCounter()
    # Attention is kept out of graphs on a CPU.
    parts = [
        torch.compile(layer.mlp, backend=counter, dynamic=True, fullgraph=True)
        for layer in layers_of(trainer)
    ]
    for length in (9, 19, 14):
        for part in parts:
            part(torch.randn(1, length, 32)).sum().backward()
    with torch.no_grad(), trainer._weights.off():
        for part in parts:
            part(torch.randn(1, 11, 32))
    parts[0](torch.randn(1, 12, 32)).sum().backward()
    assert counter.frame_count == 2


def layers_of(trainer):
    return trainer.policy.model.layers


def test_masters_are_saved_in_float32(make_trainer, make_batch, tmp_path):
    trainer = make_trainer(compute_dtype="bf16")
    trainer.step(make_batch(1))
    trainer.save(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.float32}
