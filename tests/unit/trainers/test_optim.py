from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from headrace.errors import ConfigError
from headrace.trainers.optim import build_adamw, check_schedule, rate_factor
from headrace.trainers.streamed_adamw import MOMENTS, StreamedAdamW

SHAPES = [(16, 7), (16,), (3, 16), (48,), (33,)]


def test_schedules_warm_up_then_follow_their_curve() -> None:
    def factors(schedule: str) -> list[float]:
        return [rate_factor(s, schedule=schedule, warmup_steps=2, total_steps=6) for s in range(1, 8)]

    assert factors("constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert factors("linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = [0.5, 1.0, *((1 + math.cos(math.pi * d)) / 2 for d in (0, 0.25, 0.5, 0.75, 1))]
    assert factors("cosine") == pytest.approx(cosine)


def test_schedules_that_cannot_be_followed_are_refused() -> None:
    with pytest.raises(ConfigError, match="linear"):
        check_schedule("step", warmup_steps=0, total_steps=None)
    with pytest.raises(ConfigError, match="total_steps"):
        check_schedule("linear", warmup_steps=5, total_steps=5)
    with pytest.raises(ConfigError, match="warmup_steps"):
        check_schedule("constant", warmup_steps=-1, total_steps=None)


def test_only_matrices_decay() -> None:
    module = nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = build_adamw(module, learning_rate=0.1, weight_decay=0.5)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(module.weight.detach(), before["weight"] * 0.95)
    torch.testing.assert_close(module.bias.detach(), before["bias"])


@pytest.mark.parametrize("on_host", [MOMENTS, MOMENTS[:1]], ids=["both", "first"])
@pytest.mark.parametrize("piece_numel", [16, 48, 10_000])
def test_moments_in_host_memory_give_the_bits_of_plain_adamw(
    piece_numel: int, on_host: tuple[str, ...]
) -> None:
    """However parameters are cut: several to a piece, or several pieces of one."""
    torch.manual_seed(0)
    plain, streamed = ([nn.Parameter(torch.empty(shape)) for shape in SHAPES] for _ in range(2))
    with torch.no_grad():
        for one, other in zip(plain, streamed, strict=True):
            other.copy_(one.normal_())
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}
    first = torch.optim.AdamW(plain, fused=True, **settings)
    second = StreamedAdamW(streamed, piece_numel=piece_numel, on_host=on_host, **settings)
    for step in range(3):
        for index, (one, other) in enumerate(zip(plain, streamed, strict=True)):
            # A parameter without a gradient is left alone and does not count the step.
            one.grad = None if index == step else torch.randn(one.shape)
            other.grad = None if one.grad is None else one.grad.clone()
        first.step()
        second.step()
    for one, other in zip(plain, streamed, strict=True):
        assert torch.equal(one, other)
        assert list(first.state[one]) == list(second.state[other])
        assert all(torch.equal(value, second.state[other][key]) for key, value in first.state[one].items())
