"""Who is compared with whom inside a group, where an environment says so of its trajectories. Pure.

In: the attempts of a group, whose trajectories may have rewards of their own and name their peers, and the returns of
the attempts. Out: an advantage for every sampled token. What a trajectory is worth is its attempt's return and its own
reward together; it is compared with the trainable trajectories of the group that name the same peers, and with no
others. So the solvers of a proposed problem are compared among themselves, and its proposer with the other proposers of
the group: hierarchical GRPO, as prime-rl has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from headrace.algos.advantages import AdvantageFunction, is_zero_variance
from headrace.types import Episode, Trajectory

Worth = list[tuple[Trajectory, float]]
"""Trainable trajectories with what they are worth."""


def names_any(episodes: Iterable[Episode]) -> bool:
    """Whether trajectories have to be told apart at all."""
    return any(t.own_reward or t.peers for episode in episodes for t in episode.trajectories)


def worth(episodes: Sequence[Episode], returns: Sequence[float]) -> Worth:
    """By attempt, then as the environment had them."""
    pairs = sorted(zip(episodes, returns, strict=True), key=lambda pair: pair[0].attempt)
    return [(t, value + t.own_reward) for e, value in pairs for t in e.trajectories if t.trainable]


def tell_nothing(episodes: Sequence[Episode], returns: Sequence[float]) -> bool:
    """Nobody earned anything else than its peers."""
    return all(
        is_zero_variance([value for _, value in alike]) for alike in _by_peers(worth(episodes, returns))
    )


def advantages(
    function: AdvantageFunction, episodes: Sequence[Episode], returns: Sequence[float]
) -> list[np.ndarray]:
    """For each episode float32 [L] over the sampled tokens of all its turns; 0 in what is not trained."""
    of_trajectory: dict[int, float] = {}
    for alike in _by_peers(worth(episodes, returns)):
        values = function([value for _, value in alike])
        of_trajectory.update({id(t): float(value) for (t, _), value in zip(alike, values, strict=True)})
    return [
        np.concatenate([_spread(t, of_trajectory.get(id(t), 0.0)) for t in episode.trajectories])
        for episode in episodes
    ]


def _by_peers(values: Worth) -> list[Worth]:
    alike: dict[str, Worth] = {}
    for trajectory, value in values:
        alike.setdefault(trajectory.peers, []).append((trajectory, value))
    return list(alike.values())


def _spread(trajectory: Trajectory, advantage: float) -> np.ndarray:
    num_tokens = sum(turn.completion.num_tokens for turn in trajectory.turns)
    return np.full(num_tokens, advantage, dtype=np.float32)
