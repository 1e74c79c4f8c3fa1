"""Adapters of fused experts in the trainer: their gradients, what is written, sent and referred to."""

from __future__ import annotations

import peft
import pytest
import torch

from headrace.data.packing import pack
from headrace.errors import ConfigError
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.lora import LoraSpec
from headrace.models.tensors import named_tensors
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.forward_check import plain_logprobs, probe_sample
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.trainers.torch_trainer import TorchTrainer

FAMILIES = ["qwen3_moe", "olmoe", "deepseek_v3"]
SPEC = LoraSpec(rank=4, alpha=8.0, targets=("all-linear", "experts"))
IDS = torch.randint(0, 32, (19,), generator=torch.Generator().manual_seed(5)).numpy()


@pytest.fixture(params=FAMILIES)
def checkpoint(request, tmp_path):
    make_tiny_model(tmp_path / "base", family=request.param, vocab_size=32, hidden_size=32, init_std=0.15)
    return tmp_path / "base"


@pytest.fixture
def make_trainer(checkpoint, sender):
    def make(spec=SPEC, **settings):
        ledger = TimeLedger(TRAINER_ACTIVITIES)
        given = {"learning_rate": 1e-2, **settings}
        return TorchTrainer(load_model(checkpoint), sender=sender, ledger=ledger, lora=spec, **given)

    return make


def stir(trainer):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    trainer._weights.refresh()


@torch.no_grad()
def policy_logprobs(trainer):
    (row,) = pack([probe_sample(IDS)], row_tokens=len(IDS))
    return token_logprobs(trainer.policy, row_tensors(row, device="cpu"))[0]


@torch.no_grad()
def model_logprobs(model):
    return plain_logprobs(model, IDS)


def published(trainer, sender):
    trainer.publish(0)
    return {
        name: torch.from_numpy(blob.data.view("float32").reshape(blob.shape).copy())
        for name, blob in sender.sent[0].items()
    }


@torch.no_grad()
def merge(model, tensors):
    """What an adapter means, by the tensors an engine is sent: of linear layers and of experts alike."""
    weights = named_tensors(model)
    for name in [n.removesuffix(".lora_A.weight") for n in tensors if n.endswith("lora_A.weight")]:
        weight = weights.get(name, weights.get(f"{name}.weight"))
        weight += tensors["scaling"] * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    return model


def test_only_the_adapter_moves_and_the_trainer_begins_as_the_model(checkpoint, make_trainer, make_batch):
    base = load_model(checkpoint)
    trainer = make_trainer(LoraSpec(rank=4, alpha=8.0, targets=("experts",)))
    torch.testing.assert_close(policy_logprobs(trainer), model_logprobs(base))
    trained = dict(trainer.model.named_parameters())
    assert trained and all(".experts." in name and "lora_" in name for name in trained)
    before = {name: parameter.clone() for name, parameter in trained.items()}
    trainer.step(make_batch(1))
    trainer.step(make_batch(2))
    assert all(not torch.equal(trained[name], values) for name, values in before.items())
    after = {n.replace(".base_layer", ""): t for n, t in trainer.policy.state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in named_tensors(base).items())
    assert float((policy_logprobs(trainer) - model_logprobs(base)).abs().max()) > 1e-4


def test_gradients_are_those_of_the_merged_weights(checkpoint, make_trainer, make_batch, sender):
    """dL/dA = s B' G and dL/dB = s G A' for each expert, with G the gradient of its weight W + s B A."""
    trainer, batch = make_trainer(), make_batch(1)
    stir(trainer)
    tensors = published(trainer, sender)
    merged = merge(load_model(checkpoint), tensors)
    full = TorchTrainer(merged, sender=None, ledger=TimeLedger(TRAINER_ACTIVITIES))
    for each in (trainer, full):
        (rows,) = each.prepare(batch)
        each.accumulate(rows, before_update=True)
    names = [name for name in named_tensors(merged) if name.endswith(("gate_up_proj", "experts.down_proj"))]
    assert names
    for name in names:
        parent, _, own = name.rpartition(".")
        wrapper = trainer.policy.get_submodule(parent)
        if own == "gate_up_proj":
            wrapper = wrapper.base_layer
        assert wrapper.parameter_name == own
        g, a, b = (
            named_tensors(merged)[name].grad,
            tensors[f"{name}.lora_A.weight"],
            tensors[f"{name}.lora_B.weight"],
        )
        a_grad, b_grad = (factor["default"].weight.grad for factor in (wrapper.lora_A, wrapper.lora_B))
        assert float(g.abs().max()) > 1e-3
        torch.testing.assert_close(a_grad, SPEC.scaling * b.mT @ g, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(b_grad, SPEC.scaling * g @ a.mT, atol=1e-6, rtol=1e-4)


def test_what_is_published_is_the_policy(checkpoint, make_trainer, sender):
    trainer = make_trainer()
    stir(trainer)
    merged = merge(load_model(checkpoint), published(trainer, sender))
    torch.testing.assert_close(policy_logprobs(trainer), model_logprobs(merged), atol=1e-5, rtol=0)
    own = sum(4 * p.numel() for p in trainer.model.parameters())
    assert own < trainer.publish(0).num_bytes <= 1.01 * own


def test_a_checkpoint_loads_with_peft_merges_and_resumes(checkpoint, make_trainer, make_batch, tmp_path):
    trainer = make_trainer()
    for step in (1, 2):
        trainer.step(make_batch(step))
    saved = tmp_path / "saved"
    saved.mkdir()
    trainer.save(saved)
    loaded = peft.PeftModel.from_pretrained(load_model(checkpoint), saved).eval()
    torch.testing.assert_close(model_logprobs(loaded), policy_logprobs(trainer), atol=1e-5, rtol=0)
    torch.testing.assert_close(model_logprobs(load_model(saved)), policy_logprobs(trainer), atol=1e-5, rtol=0)
    again = make_trainer()
    assert again.load(saved) == 2
    assert torch.equal(policy_logprobs(again), policy_logprobs(trainer))
    results = [each.step(make_batch(3)).metrics["grad_norm"] for each in (trainer, again)]
    assert results[0] == results[1]


def test_the_reference_is_the_model_without_the_adapter(checkpoint, make_trainer, make_batch):
    trainer = make_trainer(kl="k3", kl_coef=0.1)
    stir(trainer)
    ledger = TimeLedger(TRAINER_ACTIVITIES)
    full = TorchTrainer(load_model(checkpoint), sender=None, ledger=ledger, kl="k3", kl_coef=0.1)
    (rows,), (expected,) = trainer.prepare(make_batch(1)), full.prepare(make_batch(1))
    for row, other in zip(rows, expected, strict=True):
        torch.testing.assert_close(
            row.inputs.ref_logprobs_N, other.inputs.ref_logprobs_N, atol=1e-5, rtol=1e-5
        )


def test_in_bf16_the_adapter_has_float32_masters_and_the_model_none(make_trainer, make_batch):
    trainer = make_trainer(LoraSpec(rank=4, alpha=8.0, targets=("experts",)), compute_dtype="bf16")
    assert {p.dtype for p in trainer.policy.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    trainer.step(make_batch(1))
    masters, live = dict(trainer.model.named_parameters()), dict(trainer.policy.named_parameters())
    assert all(torch.equal(live[name], master.bfloat16()) for name, master in masters.items())
    assert all(p.grad is None for p in trainer.policy.parameters())


def test_experts_with_adapters_compile_as_one_piece_of_code(make_trainer):
    """One with the adapter and one without, whatever the layer."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    trainer, counter = make_trainer(), CompileCounter()
    experts = [layer.mlp.experts for layer in trainer.policy.model.layers if hasattr(layer.mlp, "experts")]
    parts = [torch.compile(each, backend=counter, dynamic=True, fullgraph=True) for each in experts]

    def inputs(num_tokens):
        chosen_TK = torch.rand(num_tokens, 4).topk(2).indices
        return torch.randn(num_tokens, 32), chosen_TK, torch.rand(num_tokens, 2)

    for num_tokens in (9, 19, 14):
        for part, each in zip(parts, experts, strict=True):
            given = inputs(num_tokens)
            found = part(*given)
            torch.testing.assert_close(found, each(*given))
            found.sum().backward()
    with torch.no_grad(), trainer._weights.off():
        for part in parts:
            part(*inputs(11))
    parts[0](*inputs(12)).sum().backward()
    assert counter.frame_count == 2


def test_targets_name_experts_or_one_of_their_weights(checkpoint, make_trainer):
    def own_names(*targets):
        trainer = make_trainer(LoraSpec(rank=4, alpha=8.0, targets=targets))
        return {
            n.partition(".lora_")[0].rpartition("layers.1.")[2] for n, _ in trainer.model.named_parameters()
        } & {
            "mlp.experts",
            "mlp.experts.base_layer",
            "self_attn.o_proj",
        }

    both = {"mlp.experts", "mlp.experts.base_layer"}
    assert own_names("experts") == own_names("gate_up_proj", "experts.down_proj") == both
    assert own_names("down_proj", "o_proj") == {"mlp.experts", "self_attn.o_proj"}
    assert own_names("all-linear") == {"self_attn.o_proj"}
    assert own_names("all-linear", "experts") == both | {"self_attn.o_proj"}


def test_what_cannot_be_adapted_is_named(make_trainer):
    with pytest.raises(ConfigError, match=r"lora\.targets.*'up_proj'.*experts"):
        make_trainer(LoraSpec(rank=4, alpha=8.0, targets=("up_proj",)))
    with pytest.raises(ConfigError, match=r"lora\.dora.*experts"):
        make_trainer(LoraSpec(rank=4, alpha=8.0, targets=("experts",), dora=True))
