from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from headrace.bench.step_workload import StepWorkload
from headrace.bench.train import random_samples
from headrace.errors import ModelError
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.routers import routers, use_float_routers
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.balance import ExpertBalance, imbalance
from headrace.trainers.expert_parallel import divide_experts, expert_modules
from headrace.trainers.master_weights import compute_copy
from headrace.trainers.ranks import Ranks
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import TrainBatch

FAMILIES = ["qwen3_moe", "olmoe", "deepseek_v3"]


@pytest.fixture
def group(ranks: Ranks) -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def tiny(directory: Path, family: Any) -> PreTrainedModel:
    make_tiny_model(directory, family=family, vocab_size=32, hidden_size=32, init_std=0.3)
    return load_model(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_exchange_tokens_compute_what_they_did(
    family: Any, group: dist.ProcessGroup, tmp_path: Path
) -> None:
    model = tiny(tmp_path, family)
    plain = next(iter(expert_modules(model).values()))
    exchanging = next(iter(expert_modules(compute_copy(model, torch.float32)).values()))
    torch.manual_seed(0)
    hidden_TH = torch.randn(7, 32, requires_grad=True)
    same_TH = hidden_TH.detach().clone().requires_grad_()
    experts_TK = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    weights_TK = torch.rand(7, 2)
    expected = plain(hidden_TH, experts_TK, weights_TK)
    values = {name: p.detach().clone() for name, p in exchanging.named_parameters()}
    divide_experts(exchanging, group)
    with torch.no_grad():
        for name, parameter in exchanging.named_parameters():
            parameter.copy_(values[name])
            parameter.requires_grad_()
    found = exchanging(same_TH, experts_TK, weights_TK)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    expected.square().sum().backward()
    found.square().sum().backward()
    # The gradients reach hundreds: sums in another order differ in the sixth digit.
    torch.testing.assert_close(same_TH.grad, hidden_TH.grad, atol=1e-3, rtol=1e-4)
    for name, parameter in plain.named_parameters():
        own = dict(exchanging.named_parameters())[name].grad
        torch.testing.assert_close(own, parameter.grad, atol=1e-3, rtol=1e-4)


def test_a_model_without_experts_cannot_divide_them(group: dist.ProcessGroup, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"trainer\.expert_ranks"):
        divide_experts(tiny(tmp_path, "llama"), group)


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_in_float32_change_nothing_in_float32(family: Any, tmp_path: Path) -> None:
    model = tiny(tmp_path, family)
    assert routers(model)
    for router in routers(model).values():
        hidden_TH = torch.randn(50, 32)
        own = type(router).forward(router, hidden_TH)
        for mine, other in zip(router(hidden_TH), own, strict=True):
            assert torch.equal(mine, other)


def test_a_bfloat16_router_chooses_by_float32_logits(tmp_path: Path) -> None:
    model = compute_copy(tiny(tmp_path, "qwen3_moe"), torch.bfloat16)
    use_float_routers(model)
    router = next(iter(routers(model).values()))
    hidden_TH = torch.randn(50, 32).bfloat16()
    logits_TE, scores_TK, _ = router(hidden_TH)
    assert (logits_TE.dtype, scores_TK.dtype) == (torch.float32, torch.float32)
    exact = hidden_TH.double() @ router.weight.double().T
    torch.testing.assert_close(logits_TE.double(), exact, atol=1e-5, rtol=1e-5)
    hidden = torch.randn(1, 5, 32).bfloat16()
    assert model.model.layers[0].mlp(hidden).dtype == torch.bfloat16


def test_imbalance_is_one_for_even_use_and_adds_up_over_sequences() -> None:
    even_TE = torch.full((8, 4), 0.25)
    spread_TK = torch.tensor([[0, 1], [2, 3]] * 4)
    alone_T = torch.zeros(8, dtype=torch.int64)
    no_prefix = [torch.full((count,), 2 * count) for count in (0, 1, 2)]
    assert float(imbalance(even_TE, spread_TK, alone_T, no_prefix[1])) == pytest.approx(1.0)
    greedy_TE = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 8)
    same_TK = torch.tensor([[0, 1]] * 8)
    assert float(imbalance(greedy_TE, same_TK, alone_T, no_prefix[1])) == pytest.approx(2.0)
    two_T = torch.arange(8) // 4
    probs_TE = torch.rand(8, 4).softmax(-1)
    parts = [imbalance(probs_TE[i : i + 4], spread_TK[i : i + 4], alone_T[:4], no_prefix[1]) for i in (0, 4)]
    assert float(imbalance(probs_TE, spread_TK, two_T, no_prefix[2])) == pytest.approx(float(sum(parts)))


@pytest.mark.parametrize("row_tokens", [1000, 90, 60])
def test_shared_prompts_count_for_every_sample(row_tokens: int, sender: Any, tmp_path: Path) -> None:
    tiny(tmp_path, "qwen3_moe")
    workload = StepWorkload(num_groups=2, group_size=3, prompt_tokens=20, completion_tokens=9)
    samples = random_samples(workload, vocab_size=32)
    batch = TrainBatch(step=1, version=0, samples=tuple(samples))
    found = []
    for shared in (False, True):
        trainer = TorchTrainer(
            load_model(tmp_path), sender=sender, ledger=TimeLedger(TRAINER_ACTIVITIES), row_tokens=row_tokens,
            balance_coef=1.0, share_prefixes=shared,
        )  # fmt: skip
        trainer.accumulate(trainer.prepare(batch)[0], before_update=True)
        found.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    assert (found[1] - found[0]).norm() < 1e-4 * found[0].norm()


@pytest.mark.parametrize("num_recomputed", [0, 2])
def test_the_balance_loss_is_a_mean_over_sequences_whatever_the_rows(
    num_recomputed: int, make_batch: Any, sender: Any, tmp_path: Path
) -> None:
    batch: TrainBatch = make_batch(1)
    tiny(tmp_path, "qwen3_moe")

    def step(row_tokens: int, coef: float) -> dict[str, float]:
        trainer = TorchTrainer(
            load_model(tmp_path),
            sender=sender,
            ledger=TimeLedger(TRAINER_ACTIVITIES),
            row_tokens=row_tokens,
            balance_coef=coef,
        )
        trainer.blocks.num_recomputed = num_recomputed
        return dict(trainer.step(batch).metrics)

    without, whole, cut = step(1000, 0.0), step(1000, 0.5), step(1, 0.5)
    assert "expert_imbalance" not in without
    assert whole["loss"] - without["loss"] == pytest.approx(0.5 * whole["expert_imbalance"], rel=1e-4)
    for name in ("loss", "grad_norm", "expert_imbalance"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-5), name
    assert whole["grad_norm"] != pytest.approx(without["grad_norm"], rel=1e-3)


def test_a_model_that_routes_nothing_cannot_be_balanced(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"balance\.coef"):
        ExpertBalance(tiny(tmp_path, "llama"))
