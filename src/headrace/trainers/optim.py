"""AdamW, the learning-rate schedule and the gradient norm.

In: a model and plain numbers. Out: an optimizer whose rate is set for each step by a pure function of the
step, so that a resumed run needs no scheduler state. Matrices decay, vectors (norms, biases) do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from headrace.errors import ConfigError
from headrace.trainers.host_memory import HostMemory
from headrace.trainers.streamed_adamw import StreamedAdamW

Schedule = Literal["constant", "linear", "cosine"]


def build_adamw(
    model: nn.Module,
    *,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    host_moments: Sequence[str] = (),
    host_memory: HostMemory | None = None,
) -> torch.optim.AdamW:
    """``host_moments``: those of ``MOMENTS`` that lie in host memory, whatever the parameters are on;
    ``host_memory``: as of ``StreamedAdamW``."""
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            # One fused update moves parameters that are spread over the same ranks.
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    described = [
        {"params": parameters, "weight_decay": weight_decay if is_matrix else 0.0}
        for (is_matrix, _), parameters in sorted(groups.items(), key=lambda item: not item[0][0])
    ]
    if host_moments:
        return StreamedAdamW(
            described, lr=learning_rate, betas=betas, eps=eps, on_host=host_moments, host_memory=host_memory
        )
    return torch.optim.AdamW(described, lr=learning_rate, betas=betas, eps=eps, fused=True)


def check_schedule(schedule: str, *, warmup_steps: int, total_steps: int | None) -> None:
    """Raise ConfigError for a schedule that cannot be followed."""
    if schedule not in get_args(Schedule):
        raise ConfigError(f"schedule {schedule!r} is unknown: use one of {', '.join(get_args(Schedule))}")
    if warmup_steps < 0:
        raise ConfigError(f"warmup_steps must be at least 0, not {warmup_steps}")
    if schedule != "constant" and (total_steps is None or total_steps <= warmup_steps):
        raise ConfigError(
            f"schedule {schedule!r} needs total_steps above warmup_steps ({warmup_steps}), not {total_steps}"
        )


def rate_factor(step: int, *, schedule: Schedule, warmup_steps: int, total_steps: int | None) -> float:
    """Share of the peak learning rate at ``step``, the first being 1; 0 is reached after ``total_steps``."""
    if step <= warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    assert total_steps is not None
    done = min((step - 1 - warmup_steps) / (total_steps - warmup_steps), 1.0)
    return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
