"""Scalar returns of one group -> one advantage per attempt; all pure numpy.

In: the returns of the attempts that are compared with each other. Out: float32 of the same length, which
``data.samples`` spreads over each attempt's sampled tokens. An advantage depends on its own group only;
the batch-wide steps, ``whiten`` and ``scale_by_returns``, are applied to new samples when a batch is taken, and
so is the baseline of ``rae`` (``running_means``), which is what the run remembers of earlier steps.

GRPO: arXiv 2402.03300. Dr.GRPO: arXiv 2503.20783. RLOO: arXiv 2402.14740. REINFORCE++, with groups its
baseline variant: arXiv 2501.03262; its per-token KL reward is in ``reward_kl``. MaxRL: maximum likelihood RL (2026).
Lite PPO: arXiv 2508.08221. VCPO: arXiv 2602.17616. Soft overlong punishment: DAPO, arXiv 2503.14476.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from headrace.types import Sample

Returns = Sequence[float] | np.ndarray


class AdvantageFunction(Protocol):
    def __call__(self, returns: Returns) -> np.ndarray: ...


def grpo(returns: Returns, *, eps: float = 1e-4) -> np.ndarray:
    """(R - mean) / (std + eps), with the unbiased standard deviation."""
    values = _finite(returns)
    if values.size < 2:
        return np.zeros(values.size, dtype=np.float32)
    return ((values - values.mean()) / (values.std(ddof=1) + eps)).astype(np.float32)


def dr_grpo(returns: Returns) -> np.ndarray:
    """R - mean; pair it with the aggregation ``seq-mean-token-sum-norm``."""
    values = _finite(returns)
    return (values - values.mean()).astype(np.float32)


def rloo(returns: Returns) -> np.ndarray:
    """R minus the mean of the other attempts."""
    values = _finite(returns)
    if values.size < 2:
        return np.zeros(values.size, dtype=np.float32)
    others = (values.sum() - values) / (values.size - 1)
    return (values - others).astype(np.float32)


def reinforce_pp(returns: Returns) -> np.ndarray:
    """R minus the group mean (R itself for a lone attempt); complete only after ``whiten`` over the batch."""
    values = _finite(returns)
    return (values - values.mean()).astype(np.float32) if values.size > 1 else values.astype(np.float32)


def maxrl(returns: Returns) -> np.ndarray:
    """(R - mean) / mean, for returns of at least 0; a group that earned nothing has no direction."""
    values = _finite(returns)
    if values.size and values.min() < 0:
        raise ValueError(
            f"returns: advantage maxrl divides by the group's mean, so none may be below 0, not {values.min():g}; "
            "use rewards of at least 0, or another algo.advantage"
        )
    mean = values.mean() if values.size else 0.0
    return ((values - mean) / mean if mean > 0 else np.zeros_like(values)).astype(np.float32)


def lite_ppo(returns: Returns) -> np.ndarray:
    """R minus the group mean; complete only after ``scale_by_returns`` over the batch."""
    return dr_grpo(returns)


def rae(returns: Returns) -> np.ndarray:
    """R itself; complete only after ``running_means.over_means`` has taken the agent's running mean off."""
    return _finite(returns).astype(np.float32)


def vcpo(returns: Returns) -> np.ndarray:
    """R itself; complete only after the trainer, which alone knows gradients, has taken ``optimal_baseline`` off."""
    return _finite(returns).astype(np.float32)


def optimal_baseline(returns: Returns, log_weights: Returns, squared_norms: Returns) -> float:
    """b = sum w^2 |g|^2 R / sum w^2 |g|^2, with the attempts' ratios to the behaviour policy w and the gradients of
    their log-probabilities g: the b for which w g (R - b) has the least second moment. The mean where no gradient is
    there to be weighed."""
    values, squares = _finite(returns), np.asarray(squared_norms, dtype=np.float64)
    logs = np.asarray(log_weights, dtype=np.float64)
    shares = np.exp(2 * (logs - logs.max())) * squares
    return float((shares * values).sum() / shares.sum()) if shares.sum() > 0 else float(values.mean())


ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo,
    "dr-grpo": dr_grpo,
    "rloo": rloo,
    "reinforce++": reinforce_pp,
    "maxrl": maxrl,
    "lite-ppo": lite_ppo,
    "rae": rae,
    "vcpo": vcpo,
}


def against_frozen(name: str, returns: Returns, frozen: Returns, *, group_size: int) -> np.ndarray:
    """Advantages of attempts that came too late for their group's quorum: baseline and scale are those of ``frozen``,
    the quorum's returns. Where a scale divides, they are cut at the most an attempt of a whole group can have: held
    against a quorum that is nearly unanimous, a dissenter would have any number."""
    if name in RUNNING:
        return ADVANTAGES[name](returns)
    values, known = _finite(returns), _finite(frozen)
    mean, advantages = known.mean(), values - known.mean()
    if name == "grpo":
        most = (group_size - 1) / np.sqrt(group_size)
        advantages = np.clip(advantages / (known.std(ddof=1) + 1e-4), -most, most)
    if name == "maxrl":
        most = group_size - 1.0
        advantages = np.clip(advantages / mean, -1.0, most) if mean > 0 else np.zeros_like(values)
    return advantages.astype(np.float32)


RUNNING = frozenset({"rae"})
"""Advantages that compare with what was earned in earlier steps, not with the attempts of a group."""

BY_THE_TRAINER = frozenset({"vcpo"})
"""Advantages whose baseline needs gradients: a batch brings the returns."""

BATCH_WHITENED = frozenset({"reinforce++"})
"""Advantages that ``whiten`` completes when a batch is taken."""

BATCH_SCALED = frozenset({"lite-ppo"})
"""Advantages that ``scale_by_returns`` completes when a batch is taken."""


def whiten(samples: Sequence[Sample], *, eps: float = 1e-8) -> tuple[Sample, ...]:
    """New samples whose advantages have mean 0 and variance 1 over all loss tokens of the batch."""
    parts = [sample.advantages[sample.loss_mask] for sample in samples]
    values = np.concatenate(parts).astype(np.float64) if parts else np.zeros(0)
    if values.size < 2:
        return tuple(samples)
    mean, scale = values.mean(), 1.0 / np.sqrt(values.var(ddof=1) + eps)

    def whitened(sample: Sample) -> Sample:
        moved = np.where(sample.loss_mask, (sample.advantages - mean) * scale, 0.0)
        return replace(sample, advantages=moved.astype(np.float32))

    return tuple(map(whitened, samples))


def scale_by_returns(
    samples: Sequence[Sample], returns: Sequence[float], *, eps: float = 1e-4
) -> tuple[Sample, ...]:
    """New samples whose advantages are divided by the deviation of all the batch's returns."""
    if len(returns) < 2:
        return tuple(samples)
    scale = np.float32(1.0 / (np.std(np.asarray(returns, dtype=np.float64), ddof=1) + eps))
    return tuple(replace(sample, advantages=sample.advantages * scale) for sample in samples)


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> float:
    """0 up to ``max_tokens - buffer_tokens``, then falling linearly to ``-factor`` at ``max_tokens``."""
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"buffer_tokens must be between 1 and max_tokens ({max_tokens}), not {buffer_tokens}"
        )
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -factor * min(max(excess / buffer_tokens, 0.0), 1.0)


def is_zero_variance(returns: Returns, *, tolerance: float = 1e-9) -> bool:
    """True when every attempt earned the same, so that no advantage can point anywhere."""
    values = _finite(returns)
    spread = float(values.max() - values.min()) if values.size else 0.0
    return spread <= tolerance * max(1.0, float(np.abs(values).max(initial=0.0)))


def _finite(returns: Returns) -> np.ndarray:
    values = np.asarray(returns, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"returns must be finite, not {values.tolist()}: check the reward functions")
    return values
