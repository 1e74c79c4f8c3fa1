"""From rewards by name to the one number an attempt is judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.errors import RewardError


def weighted_return(rewards: Mapping[str, float | None], weights: Sequence[float] | None = None) -> float:
    """Sum of the applicable rewards; ``weights`` follow the order of the names and default to 1."""
    factors = [1.0] * len(rewards) if weights is None else weights
    if len(factors) != len(rewards):
        raise RewardError(
            f"reward.weights has {len(factors)} entries for {len(rewards)} rewards ({', '.join(rewards)})"
        )
    applicable = [w * r for w, r in zip(factors, rewards.values(), strict=True) if r is not None]
    if not applicable:
        raise RewardError(
            f"no reward applies: {', '.join(rewards) or 'none was given'} all returned None for an attempt"
        )
    return float(sum(applicable))
