from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from headrace.data.samples import NEVER_SAMPLED, build_samples, oldest_versions
from headrace.types import (
    Completion,
    Episode,
    EpisodeGroup,
    Routing,
    Sampling,
    SamplingMask,
    Task,
    Trajectory,
    Turn,
)

TASK = Task(id="t", prompt="")


def turn(
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    version: int = 0,
    temperature: float = 1.0,
    routing: Routing | None = None,
    sampling_mask: SamplingMask | None = None,
) -> Turn:
    length = len(sampled)
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        completion=Completion(
            token_ids=np.array(sampled, np.int32),
            logprobs=-np.array(sampled, np.float32) / 10,
            versions=np.full(length, version, np.int32),
            finish_reason="stop",
            kv_versions=np.array([[version, len(prompt) + length - 1]], np.int32),
            routing=routing,
            sampling_mask=sampling_mask,
        ),
        sampling=Sampling(max_tokens=8, temperature=temperature),
        seed=0,
        engine="e",
    )


def group(*attempts: tuple[int, Sequence[Turn]], trainable: bool = True) -> EpisodeGroup:
    episodes = tuple(
        Episode(
            group=7,
            attempt=attempt,
            task=TASK,
            trajectories=(Trajectory(turns=tuple(turns), text="", trainable=trainable),),
        )
        for attempt, turns in attempts
    )
    return EpisodeGroup(group=7, task=TASK, episodes=episodes, returns=(0.0,) * len(episodes))


def test_a_single_turn_becomes_one_sample() -> None:
    (sample,) = build_samples(group((0, [turn([1, 2], [3, 4, 5], version=6, temperature=0.7)])), [0.5])
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [False, False, True, True, True]
    np.testing.assert_allclose(sample.behavior_logprobs, [0, 0, -0.3, -0.4, -0.5])
    assert sample.versions.tolist() == [-1, -1, 6, 6, 6]
    assert sample.advantages.tolist() == [0, 0, 0.5, 0.5, 0.5]
    assert (sample.group, sample.attempt, sample.temperature) == (7, 0, 0.7)
    assert sample.kv_versions.tolist() == [[6, 4]]
    assert oldest_versions([sample]).tolist() == [6]


def test_a_turn_that_repeats_the_tokens_before_it_is_merged() -> None:
    turns = [turn([1, 2], [3, 4], version=0), turn([1, 2, 3, 4, 9, 9], [5], version=2)]
    (sample,) = build_samples(group((0, turns)), [1.0])
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert sample.versions.tolist() == [-1, -1, 0, 0, -1, -1, 2]
    assert sample.advantages.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert sample.kv_versions.tolist() == [[2, 6]]
    assert oldest_versions([sample]).tolist() == [0]


@pytest.mark.parametrize(
    "second",
    [
        turn([1, 2, 3, 8, 9], [5]),
        turn([1, 2, 3], [5]),
        turn([0, 2, 3, 4, 9], [5]),
        turn([1, 2, 3, 4, 9], [5], temperature=0.5),
    ],
    ids=["edited", "shorter", "other-prompt", "other-temperature"],
)
def test_any_other_turn_begins_a_new_sample(second: Turn) -> None:
    samples = build_samples(group((0, [turn([1, 2], [3, 4]), second])), [1.0])
    assert [sample.num_loss_tokens for sample in samples] == [2, 1]
    assert samples[1].token_ids.tolist() == [*second.prompt_ids.tolist(), 5]


def test_samples_follow_the_attempts_with_their_own_advantages() -> None:
    scored = group((2, [turn([1], [2])]), (0, [turn([1], [3])]), (1, [turn([1], [4])]))
    samples = build_samples(scored, np.array([0.2, 0.0, 0.1], np.float32))
    assert [sample.attempt for sample in samples] == [0, 1, 2]
    np.testing.assert_allclose([sample.advantages[-1] for sample in samples], [0.0, 0.1, 0.2])


def test_untrainable_trajectories_and_empty_turns_leave_nothing() -> None:
    assert build_samples(group((0, [turn([1], [2])]), trainable=False), [1.0]) == ()
    assert build_samples(group((0, [turn([1], [])])), [1.0]) == ()


def test_a_wrong_number_of_advantages_is_refused() -> None:
    with pytest.raises(ValueError, match="2 given for 1"):
        build_samples(group((0, [turn([1], [2])])), [1.0, 2.0])


def test_values_that_are_not_one_for_each_sampled_token_are_refused() -> None:
    both = group((0, [turn([1], [2, 3])]), (1, [turn([1], [4, 5])]))
    with pytest.raises(ValueError, match="3 values were given for the 2 sampled tokens"):
        build_samples(both, [np.zeros(3, np.float32), 0.0])
    # What one has too much would else be what the next lacks.
    with pytest.raises(ValueError, match="for the 2 sampled tokens"):
        build_samples(both, [np.zeros(1, np.float32), np.zeros(3, np.float32)])


def test_each_sample_is_as_old_as_its_oldest_sampled_token() -> None:
    attempts = [
        (i, [turn([1, 2], [3], version=v), turn([1, 2, 3], [4], version=8)]) for i, v in enumerate([7, 5, 9])
    ]
    samples = build_samples(group(*attempts), [1.0, 1.0, 1.0])
    samples[1].loss_mask[:] = False
    assert oldest_versions(samples).tolist() == [7, NEVER_SAMPLED, 8]


def test_routes_keep_their_tokens_through_a_merge() -> None:
    """Each row is marked with its position; the first turn's last token is routed in the second's prefill."""

    def rows(*positions: int) -> np.ndarray:
        return np.array([[[position, 0]] for position in positions], np.uint8)

    first = Routing(experts=rows(2), recorded=np.array([True, False]))
    second = Routing(
        experts=rows(20, 3, 4, 5), recorded=np.array([False, False, True, True, True, True, False])
    )
    turns = [turn([1, 2], [3, 4], routing=first), turn([1, 2, 3, 4, 9], [5, 6], routing=second)]
    (sample,) = build_samples(group((0, turns)), [1.0])
    assert sample.routing is not None
    assert sample.routing.recorded.tolist() == [False, False, True, True, True, True, False]
    assert sample.routing.experts[:, 0, 0].tolist() == [2, 3, 4, 5]


def test_sampling_masks_keep_their_tokens_through_a_merge() -> None:
    first = SamplingMask(token_ids=np.array([3, 8, 4], np.int32), offsets=np.array([0, 2, 3]))
    second = SamplingMask(token_ids=np.array([5, 6], np.int32), offsets=np.array([0, 2]))
    turns = [turn([1, 2], [3, 4], sampling_mask=first), turn([1, 2, 3, 4, 9], [5], sampling_mask=second)]
    (sample,) = build_samples(group((0, turns)), [1.0])
    mask = sample.sampling_mask
    assert mask is not None
    kept = [mask.token_ids[mask.offsets[t] : mask.offsets[t + 1]].tolist() for t in range(6)]
    assert kept == [[], [], [3, 8], [4], [], [5, 6]]
