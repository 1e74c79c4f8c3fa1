"""Scored groups -> token sequences to train on, without touching a token.

In: an ``EpisodeGroup`` and each episode's advantage, one for all its tokens or one a token. Out: ``Sample``
objects ordered by attempt. A turn whose prompt repeats everything before it, token for token, joins the sample
of the turn before (what lies between was written by the environment and is not trained on); any other turn
begins a new sample. Each sampled token therefore appears in exactly one sample, with the log-probability and
version it was sampled with.

Legend: P prompt tokens, L sampled tokens, T tokens of the sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from headrace.data.routing import merge_routing
from headrace.types import Episode, EpisodeGroup, Routing, Sample, SamplingMask, Task, Trajectory, Turn

NEVER_SAMPLED = 2**31 - 1
"""``oldest_version`` of a sample without sampled tokens, as ``EpisodeGroup.oldest_version`` has it."""


def build_samples(
    group: EpisodeGroup, advantages: Sequence[float | np.ndarray] | np.ndarray
) -> tuple[Sample, ...]:
    """A sample per chain of turns of each trainable trajectory; ``advantages`` follow ``group.episodes``: a number
    for all sampled tokens of an episode, or an array with one for each, its turns one after the other."""
    if len(advantages) != len(group.episodes):
        raise ValueError(f"advantages: {len(advantages)} given for {len(group.episodes)} episodes")
    chains = _all_chains(group.episodes)
    columns = _Columns([chain for _, chain in chains], _by_turn(group.episodes, advantages))
    samples = [columns.sample(group.group, episode.attempt, chain) for episode, chain in chains]
    if group.ref_logprobs is not None:
        pairs = zip(samples, group.ref_logprobs, strict=True)
        samples = [replace(sample, ref_logprobs=logprobs) for sample, logprobs in pairs]
    if group.teacher is not None:
        taught = zip(samples, group.teacher, strict=True)
        samples = [replace(sample, teacher=scores) for sample, scores in taught]
    return tuple(samples)


def _by_turn(
    episodes: Sequence[Episode], advantages: Sequence[float | np.ndarray] | np.ndarray
) -> dict[int, float | np.ndarray]:
    """What the sampled tokens of each turn get, by the turn's id."""
    of_turn: dict[int, float | np.ndarray] = {}
    for episode, advantage in zip(episodes, advantages, strict=True):
        turns = [turn for trajectory in episode.trajectories for turn in trajectory.turns]
        if not isinstance(advantage, np.ndarray):
            of_turn.update({id(turn): advantage for turn in turns})
            continue
        borders = np.cumsum([turn.completion.num_tokens for turn in turns])
        of_turn.update(zip(map(id, turns), np.split(advantage, borders[:-1]), strict=True))
    return of_turn


def sequences(episodes: Sequence[Episode]) -> list[tuple[np.ndarray, float]]:
    """Token ids and temperature of every sample that these episodes will give, in the order of the samples."""
    return [
        (
            np.concatenate([chain[-1].prompt_ids, chain[-1].completion.token_ids]).astype(np.int32),
            chain[-1].sampling.temperature,
        )
        for _, chain in _all_chains(episodes)
    ]


def agents(episodes: Sequence[Episode]) -> list[str]:
    """Whose the ``sequences`` are."""
    return [
        agent_of(episode.task, trajectory)
        for episode in sorted(episodes, key=attrgetter("attempt"))
        for trajectory in episode.trajectories
        if trajectory.trainable
        for _ in _chains(trajectory)
    ]


def agent_of(task: Task, trajectory: Trajectory) -> str:
    """Whom the environment names for it, apart for each role or game that tasks name in a column ``agent``."""
    role = task.columns.get("agent")
    return trajectory.policy if role is None else f"{role}/{trajectory.policy}"


def sequence_masks(episodes: Sequence[Episode]) -> list[SamplingMask | None]:
    """The kept sets that belong to ``sequences``."""
    return [_chain_sampling_mask(chain, _num_tokens(chain)) for _, chain in _all_chains(episodes)]


def _all_chains(episodes: Sequence[Episode]) -> list[tuple[Episode, list[Turn]]]:
    """With their episodes, in the order of the attempts."""
    return [
        (episode, chain)
        for episode in sorted(episodes, key=attrgetter("attempt"))
        for trajectory in episode.trajectories
        if trajectory.trainable
        for chain in _chains(trajectory)
    ]


def oldest_versions(samples: Sequence[Sample]) -> np.ndarray:
    """int32, the version of the oldest sampled token of each."""
    sampled = np.concatenate([sample.loss_mask for sample in samples])
    versions = np.where(sampled, np.concatenate([sample.versions for sample in samples]), NEVER_SAMPLED)
    return np.minimum.reduceat(versions, np.cumsum([0, *(sample.num_tokens for sample in samples[:-1])]))


def _chains(trajectory: Trajectory) -> list[list[Turn]]:
    """Turns grouped so that each continues the tokens of the one before it."""
    chains: list[list[Turn]] = []
    for turn in trajectory.turns:
        if turn.completion.num_tokens == 0:
            continue
        if chains and _continues(chains[-1][-1], turn):
            chains[-1].append(turn)
        else:
            chains.append([turn])
    return chains


def _continues(before: Turn, turn: Turn) -> bool:
    start = before.prompt_ids.shape[0]
    end = start + before.completion.num_tokens
    return (
        before.sampling.temperature == turn.sampling.temperature
        and turn.prompt_ids.shape[0] >= end
        and np.array_equal(turn.prompt_ids[:start], before.prompt_ids)
        and np.array_equal(turn.prompt_ids[start:end], before.completion.token_ids)
    )


class _Columns:
    """The tokens of a group's samples side by side, of which every sample is a stretch: a handful of arrays
    is made for the group instead of for each attempt."""

    def __init__(
        self, chains: Sequence[Sequence[Turn]], advantage_of_turn: Mapping[int, float | np.ndarray]
    ) -> None:
        self._used = 0
        ends, turns = [chain[-1] for chain in chains], [turn for chain in chains for turn in chain]
        shown = [ids for turn in ends for ids in (turn.prompt_ids, turn.completion.token_ids)]
        sizes = _sizes(chains)
        self._token_ids = _joined(shown, np.int32)
        self._loss_mask = np.repeat(np.array([False, True] * len(turns), dtype=bool), sizes)
        self._logprobs = _among(sizes, [turn.completion.logprobs for turn in turns], 0, np.float32)
        self._versions = _among(sizes, [turn.completion.versions for turn in turns], -1, np.int32)
        self._advantages = _among(sizes, [advantage_of_turn[id(turn)] for turn in turns], 0, np.float32)

    def sample(self, group: int, attempt: int, chain: Sequence[Turn]) -> Sample:
        """The next stretch, which is that of ``chain``."""
        start, last, num_tokens = self._used, chain[-1], _num_tokens(chain)
        end = self._used = start + num_tokens
        return Sample(
            group=group,
            attempt=attempt,
            token_ids=self._token_ids[start:end],
            loss_mask=self._loss_mask[start:end],
            behavior_logprobs=self._logprobs[start:end],
            versions=self._versions[start:end],
            advantages=self._advantages[start:end],
            temperature=last.sampling.temperature,
            kv_versions=last.completion.kv_versions,
            finish_reason=last.completion.finish_reason,
            routing=_chain_routing(chain, num_tokens),
            sampling_mask=_chain_sampling_mask(chain, num_tokens),
        )


def _sizes(chains: Sequence[Sequence[Turn]]) -> list[int]:
    """Along all chains and for each turn: tokens before it that it did not sample, and tokens that it did."""
    sizes: list[int] = []
    for chain in chains:
        end = 0
        for turn in chain:
            start, num_sampled = len(turn.prompt_ids), len(turn.completion.token_ids)
            sizes += (start - end, num_sampled)
            end = start + num_sampled
    return sizes


def _among(
    sizes: Sequence[int], sampled: Sequence[float | np.ndarray], elsewhere: int, dtype: type
) -> np.ndarray:
    """What each turn's sampled tokens have, an entry for each or one for all, among tokens that were not sampled."""
    if not any(isinstance(values, np.ndarray) for values in sampled):
        return np.repeat(np.array([x for value in sampled for x in (elsewhere, value)], dtype=dtype), sizes)
    blank: np.ndarray = np.full(max(sizes[::2]), elsewhere, dtype=dtype)
    pieces: list[np.ndarray] = []
    for num_before, size, given in zip(sizes[::2], sizes[1::2], sampled, strict=True):
        values = given if isinstance(given, np.ndarray) else np.full(size, given)
        if len(values) != size:
            # Joined, they would shift those of every turn behind.
            raise ValueError(
                f"{len(values)} values were given for the {size} sampled tokens of a turn; give one each"
            )
        pieces += (blank[:num_before], values)
    return _joined(pieces, dtype)


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.zeros(0, dtype=dtype)


def _num_tokens(chain: Sequence[Turn]) -> int:
    return chain[-1].prompt_ids.shape[0] + chain[-1].completion.num_tokens


def _chain_routing(chain: Sequence[Turn], num_tokens: int) -> Routing | None:
    """Routes of every position; where two turns recorded one, the first is kept: it made the logprobs."""
    ends = [
        (routing, turn.prompt_ids.shape[0] + turn.completion.num_tokens)
        for turn in chain
        if (routing := turn.completion.routing) is not None
    ]
    return merge_routing(ends, num_tokens)


def _chain_sampling_mask(chain: Sequence[Turn], num_tokens: int) -> SamplingMask | None:
    """Kept tokens by position of the sample; positions that were not sampled have empty rows."""
    masks = [(turn, mask) for turn in chain if (mask := turn.completion.sampling_mask) is not None]
    if not masks:
        return None
    counts = np.zeros(num_tokens, dtype=np.int64)
    for turn, mask in masks:
        start = turn.prompt_ids.shape[0]
        counts[start : start + turn.completion.num_tokens] = np.diff(mask.offsets)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    token_ids = np.concatenate([mask.token_ids for _, mask in masks]).astype(np.int32)
    return SamplingMask(token_ids=token_ids, offsets=offsets)
