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
    columns = _Columns(sum([_num_tokens(chain) for _, chain in chains]))
    of_turn = _by_turn(group.episodes, advantages)
    samples = [columns.sample(group.group, episode.attempt, of_turn, chain) for episode, chain in chains]
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
        parts = [advantage] * len(turns)
        if isinstance(advantage, np.ndarray):
            borders = np.cumsum([turn.completion.num_tokens for turn in turns])
            parts = np.split(advantage, borders[:-1])
        of_turn.update(zip(map(id, turns), parts, strict=True))
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

    def __init__(self, num_tokens: int) -> None:
        self._used = 0
        self._token_ids = np.empty(num_tokens, dtype=np.int32)
        self._loss_mask = np.zeros(num_tokens, dtype=bool)
        self._logprobs = np.zeros(num_tokens, dtype=np.float32)
        self._versions = np.full(num_tokens, -1, dtype=np.int32)
        self._advantages = np.zeros(num_tokens, dtype=np.float32)

    def sample(
        self,
        group: int,
        attempt: int,
        advantage_of_turn: Mapping[int, float | np.ndarray],
        chain: Sequence[Turn],
    ) -> Sample:
        """The next stretch, filled with ``chain``."""
        start, last, num_tokens = self._used, chain[-1], _num_tokens(chain)
        end = self._used = start + num_tokens
        answer = start + last.prompt_ids.shape[0]
        self._token_ids[start:answer] = last.prompt_ids
        self._token_ids[answer:end] = last.completion.token_ids
        for turn in chain:
            first = start + turn.prompt_ids.shape[0]
            span = slice(first, first + turn.completion.num_tokens)
            self._loss_mask[span] = True
            self._logprobs[span] = turn.completion.logprobs
            self._versions[span] = turn.completion.versions
            self._advantages[span] = advantage_of_turn[id(turn)]
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
