from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from headrace.data.packing import pack
from headrace.errors import InvariantError
from headrace.models.joined_linear import GATE_UP, QUERY_KEY_VALUE, JoinedLinear
from headrace.models.lora import LoraSpec
from headrace.models.tensors import as_tensor
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers import placement
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.trainers.master_weights import MasterWeights, compute_copy
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import TrainBatch

MakeModel = Callable[..., PreTrainedModel]


def test_in_float32_there_is_one_model(make_model: MakeModel) -> None:
    model = make_model()
    masters = MasterWeights(model, torch.float32)
    assert masters.policy is model
    masters.refresh()


def test_a_copy_is_narrow_tied_and_keeps_its_rotary_table(make_model: MakeModel) -> None:
    model = make_model()
    twin = compute_copy(model, torch.bfloat16)
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    table = twin.model.rotary_emb.inv_freq
    assert table.dtype == torch.float32 and torch.equal(table, model.model.rotary_emb.inv_freq)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert twin.config is not model.config


def test_gradients_of_many_rows_add_up_in_float32(make_model: MakeModel) -> None:
    model = make_model()
    policy = MasterWeights(model, torch.bfloat16).policy
    weight = policy.model.norm.weight
    # Beside 1 a share of 1 / 1024 is lost in bf16.
    for share in [1.0] + 8 * [2.0**-10]:
        (weight * share).sum().backward()
    assert weight.grad is None
    assert torch.equal(model.model.norm.weight.grad, torch.full((32,), 1 + 8 * 2.0**-10))


def test_the_policy_follows_the_weights_in_place(make_model: MakeModel) -> None:
    model = make_model()
    masters = MasterWeights(model, torch.bfloat16)
    addresses = [p.data_ptr() for p in masters.policy.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    masters.refresh()
    assert [p.data_ptr() for p in masters.policy.parameters()] == addresses
    for mine, other in zip(masters.policy.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, other.to(torch.bfloat16))


def test_bf16_resumes_bit_exactly(
    tmp_path: Path, make_model: MakeModel, make_batch: Callable[..., TrainBatch], sender: Any
) -> None:
    def build(seed: int = 0) -> TorchTrainer:
        return TorchTrainer(
            make_model(seed=seed),
            sender=sender,
            ledger=TimeLedger(TRAINER_ACTIVITIES),
            learning_rate=1e-3,
            compute_dtype="bf16",
            kl="k2",
            kl_coef=0.05,
        )

    straight, first, second = build(), build(), build(seed=9)
    for step in (1, 2, 3, 4):
        straight.step(make_batch(step))
    for step in (1, 2):
        first.step(make_batch(step))
    first.save(tmp_path)
    assert second.load(tmp_path) == 2
    for step in (3, 4):
        second.step(make_batch(step))
    for one, other in ((second.model, straight.model), (second.policy, straight.policy)):
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name


def test_small_updates_are_kept_though_bf16_cannot_show_them(
    make_model: MakeModel, make_batch: Callable[..., TrainBatch], sender: Any
) -> None:
    ledger = TimeLedger(TRAINER_ACTIVITIES)
    trainer = TorchTrainer(
        make_model(), sender=sender, ledger=ledger, learning_rate=1e-5, compute_dtype="bf16"
    )
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    seen = {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}
    trainer.step(make_batch(1))
    moved = [float((trainer.model.state_dict()[n] != t).float().mean()) for n, t in before.items()]
    shown = [float((trainer.policy.state_dict()[n] != t).float().mean()) for n, t in seen.items()]
    assert np.mean(moved) > 0.9 > 0.2 > np.mean(shown)


@pytest.mark.parametrize("dense", [True, False])
def test_what_is_published_is_what_the_policy_has_now(dense: bool, make_model: MakeModel) -> None:
    """Also of a weight that is no dense memory, whose blob is a copy."""
    model = make_model()
    weight = model.get_decoder().layers[0].mlp.down_proj.weight
    if not dense:
        weight.data = weight.data.t().contiguous().t()
    weights = MasterWeights(model, model.dtype)
    list(weights.blobs())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    assert all((as_tensor(blob) == 0.5).all() for blob in weights.blobs())


def build(model: PreTrainedModel, sender: Any = None, **chosen: Any) -> TorchTrainer:
    return TorchTrainer(
        model,
        sender=sender,
        ledger=TimeLedger(TRAINER_ACTIVITIES),
        **{"learning_rate": 1e-3, "compute_dtype": "bf16", **chosen},
    )


def num_joined(model: PreTrainedModel) -> int:
    return sum(isinstance(module, JoinedLinear) for module in model.modules())


def test_only_narrow_copies_of_a_model_that_is_trained_whole_are_joined(make_model: MakeModel) -> None:
    trainer = build(make_model(), kl="k2", kl_coef=0.05)
    reference = trainer._reference
    assert reference is not None
    assert [num_joined(m) for m in (trainer.policy, trainer.model, reference.policy)] == [10, 0, 10]
    with pytest.raises(InvariantError, match="copy it first"):
        compute_copy(trainer.policy, torch.bfloat16)
    assert num_joined(build(make_model(), compute_dtype="fp32").policy) == 0
    assert num_joined(build(make_model(), lora=LoraSpec(rank=2, alpha=4.0)).policy) == 0


def test_a_joined_policy_trains_like_one_whose_layers_are_apart(
    make_model: MakeModel, make_batch: Callable[..., TrainBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = build(make_model())
    for changing in ("join_linears", "join_gates"):
        monkeypatch.setattr(placement, changing, lambda *_: 0)
    apart = build(make_model())
    assert (num_joined(joined.policy), num_joined(apart.policy)) == (10, 0)
    (row,) = pack(make_batch(1).samples, row_tokens=10_000)
    found = []
    for trainer in (joined, apart, build(make_model(), compute_dtype="fp32")):
        logprobs, _ = token_logprobs(trainer.policy, row_tensors(row, device="cpu"))
        logprobs.sum().backward()
        assert trainer.policy is trainer.model or all(p.grad is None for p in trainer.policy.parameters())
        gradients = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])
        found.append((logprobs.detach(), gradients))
        trainer.optimizer.zero_grad()
    for mine, other, exact in zip(*found, strict=True):
        # Sums are taken in another order, and an input's gradient is rounded once instead of three times.
        assert float((mine - other).norm() / exact.norm()) < 0.01
        assert float((mine - exact).norm()) < 1.1 * float((other - exact).norm())
    results = [[trainer.step(make_batch(step)).metrics for step in (1, 2, 3)] for trainer in (joined, apart)]
    for one, other in zip(*results, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.02, abs=2e-3)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.02)


def test_a_joined_policy_computes_with_what_it_publishes(
    make_model: MakeModel, make_batch: Callable[..., TrainBatch], sender: Any
) -> None:
    trainer = build(make_model(), sender)
    trainer.publish(0)
    trainer.step(make_batch(1))
    trainer.publish(1)
    sent = sender.sent[1]
    assert any(
        (sent[name].data != old.data).any() for name, old in sender.sent[0].items() if "q_proj" in name
    )
    for layer in trainer.policy.model.layers:
        for part, names in ((layer.self_attn, QUERY_KEY_VALUE), (layer.mlp, GATE_UP)):
            whole, _ = part.get_submodule(names[0]).joined
            assert torch.equal(whole, torch.cat([part.get_submodule(n).weight for n in names]))
    for name, parameter in trainer.policy.named_parameters():
        assert parameter.is_contiguous() and torch.equal(as_tensor(sent[name]), parameter)
