"""Each promise of the contract, broken once: the checker names it, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.data.record_checks import Limits, turn_faults
from headrace.types import Completion, Routing, Sampling, SamplingMask, Turn

LIMITS = Limits(
    vocab_size=20, newest_version=4, context_tokens=64, num_experts=8, experts_per_token=2, routed_layers=2
)
SEED = 77


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def sound_turn() -> Turn:
    """Three prompt tokens and four sampled ones, over two versions."""
    experts = np.array([[[0, 1], [2, 3]]] * 6, dtype=np.uint8)
    completion = Completion(
        token_ids=ints(5, 6, 7, 2),
        logprobs=np.array([-0.5, -1.5, 0.0, -0.25], dtype=np.float32),
        versions=ints(3, 3, 4, 4),
        finish_reason="stop",
        kv_versions=ints(3, 4, 4, 2).reshape(2, 2),
        routing=Routing(experts=experts, recorded=np.array([True] * 6 + [False])),
        sampling_mask=SamplingMask(
            token_ids=ints(1, 5, 6, 7, 8, 7, 2, 9), offsets=np.array([0, 2, 5, 6, 8], dtype=np.int64)
        ),
    )
    return Turn(
        prompt_ids=ints(9, 8, 4),
        completion=completion,
        sampling=Sampling(max_tokens=6, temperature=0.7, top_k=3, stop_ids=(2, 3)),
        seed=SEED,
        engine="engine-0",
    )


def changed(**fields: object) -> Turn:
    turn = sound_turn()
    return replace(turn, completion=replace(turn.completion, **fields))


def sampled(**fields: object) -> Turn:
    turn = sound_turn()
    return replace(turn, sampling=replace(turn.sampling, **fields))


def mask(ids: list[int], offsets: list[int]) -> SamplingMask:
    return SamplingMask(token_ids=ints(*ids), offsets=np.array(offsets, dtype=np.int64))


def routes(**fields: object) -> Turn:
    return changed(routing=replace(sound_turn().completion.routing, **fields))


EXPERTS = sound_turn().completion.routing.experts
DOUBLED, BEYOND = EXPERTS.copy(), EXPERTS.copy()
DOUBLED[2, 1] = 5
BEYOND[4, 0, 1] = 8
WHOLE = [0, 2, 5, 6, 8]

BROKEN = {
    "logprobs of another length": (changed(logprobs=np.zeros(3, np.float32)), "lengths", "(3,)"),
    "versions of another type": (changed(versions=np.zeros(4, np.int64)), "lengths", "int64"),
    "a logprob that is no number": (
        changed(logprobs=np.array([0, np.nan, 0, 0], np.float32)), "logprobs", "token 1"),
    "a logprob above 0": (changed(logprobs=np.array([0, 0, 0.1, 0], np.float32)), "logprobs", "token 2"),
    "greedy with logprobs": (
        replace(changed(sampling_mask=None), sampling=Sampling(max_tokens=6, temperature=0.0, stop_ids=(2,))),
        "logprobs", "greedy"),
    "a version that falls": (
        changed(versions=ints(3, 3, 4, 3)), "versions", "token 3 is of version 3, after one of version 4"),
    "a version from before": (
        changed(versions=ints(-1, 3, 4, 4)), "versions", "before the first weights"),
    "a version from the future": (
        changed(versions=ints(3, 3, 4, 5), kv_versions=ints(5, 6).reshape(1, 2)),
        ("versions", "kv-versions"), "the run has reached 4"),
    "a row of keys and values too many": (
        changed(kv_versions=ints(3, 4, 4, 3).reshape(2, 2)), "kv-versions", "7 rows of keys and values, not 6"),
    "no rows of keys and values": (
        changed(kv_versions=np.zeros((0, 2), np.int32)), "kv-versions", "0 rows"),
    "rows that grow older": (
        changed(kv_versions=ints(4, 3, 3, 3).reshape(2, 2)), "kv-versions", "older weights"),
    "a row older than its token": (
        changed(kv_versions=ints(3, 5, 4, 1).reshape(2, 2)), "kv-versions",
        "token 2 is of version 4, its row before of 3"),
    "an id outside the vocabulary": (
        replace(sound_turn(), prompt_ids=ints(9, 20, 4)), "vocabulary", "the vocabulary has 20"),
    "a mask without the sampled token": (
        changed(sampling_mask=mask([1, 4, 6, 7, 8, 7, 2, 9], WHOLE)), "mask",
        "row 0 does not hold the sampled token 5"),
    "a mask of another vocabulary": (
        changed(sampling_mask=mask([1, 5, 6, 7, 8, 7, 2, 20], WHOLE)), "mask",
        "outside the vocabulary of 20"),
    "a mask of other tokens": (
        changed(sampling_mask=mask([1, 5, 6], [0, 2, 3])), "mask", "2 rows for 4 tokens"),
    "an id twice in a row": (
        changed(sampling_mask=mask([5, 5, 6, 7, 8, 7, 2, 9], WHOLE)), "mask", "twice"),
    "offsets that end early": (
        changed(sampling_mask=mask([1, 5, 6, 7, 8, 7, 2, 9], [0, 2, 5, 6, 7])), "mask", "offsets"),
    "more than top_k": (sampled(top_k=2), "mask", "row 1 holds 3 ids, top_k is 2"),
    "no mask of a cut distribution": (changed(sampling_mask=None), "mask", "no kept sets"),
    "a mask of a whole distribution": (sampled(top_k=0), "mask", "not cut"),
    "a row for the last token": (
        routes(recorded=np.array([False] + [True] * 6)), "routes", "the last sampled token has a row"),
    "routes of other tokens": (routes(recorded=np.ones(5, bool)), "routes", "(5,)"),
    "marks without rows": (
        routes(recorded=np.array([True] * 5 + [False] * 2)), "routes", "5 tokens are marked"),
    "an expert twice": (routes(experts=DOUBLED), "routes", "row 2 names an expert twice"),
    "an expert that is not there": (routes(experts=BEYOND), "routes", "expert 8"),
    "a layer too few": (routes(experts=EXPERTS[:, :1]), "routes", "experts of 1 layers, the model has 2"),
    "experts of another type": (routes(experts=EXPERTS.astype(np.int64)), "routes", "int64"),
    "stopped without a stop id": (sampled(stop_ids=(3,)), "finish", "does not end with a stop id"),
    "a stop id in the middle": (sampled(stop_ids=(2, 6)), "finish", "token 1 is a stop id, but 2 tokens follow"),
    "too long": (sampled(max_tokens=3), "finish", "max_tokens is 3"),
    "an unfinished turn": (changed(finish_reason="abort"), "finish", "unfinished"),
    "cut short, it says": (changed(finish_reason="length"), "finish", "ends with a stop id"),
    "cut before its length": (
        replace(changed(finish_reason="length"), sampling=replace(sound_turn().sampling, stop_ids=())),
        "finish", "length at 4 of 6 tokens and 7 of a context of 64"),
    "another seed": (replace(sound_turn(), seed=SEED + 1), "seed", "give 77"),
}  # fmt: skip


def test_a_sound_turn_has_no_fault():
    assert turn_faults(sound_turn(), LIMITS, seed=SEED) == []
    assert turn_faults(sound_turn(), Limits()) == []


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_promise_is_named_alone(name):
    turn, check, text = BROKEN[name]
    found = turn_faults(turn, LIMITS, seed=SEED)
    assert {fault.check for fault in found} == ({check} if isinstance(check, str) else set(check))
    assert text in found[0].text


def test_a_sequence_that_fills_the_context_may_end_early():
    turn = replace(changed(finish_reason="length"), sampling=replace(sound_turn().sampling, stop_ids=()))
    assert turn_faults(turn, replace(LIMITS, context_tokens=7), seed=SEED) == []


def test_an_attempt_may_be_given_up_where_the_run_does_so():
    turn = replace(changed(finish_reason="abort"), sampling=replace(sound_turn().sampling, stop_ids=()))
    assert turn_faults(turn, replace(LIMITS, may_give_up=True), seed=SEED) == []
    assert [fault.check for fault in turn_faults(turn, LIMITS, seed=SEED)] == ["finish"]


def test_a_turn_that_sampled_nothing_is_sound():
    nothing = np.zeros(0, np.int32)
    done = Completion(
        token_ids=nothing,
        logprobs=nothing.astype(np.float32),
        versions=nothing,
        finish_reason="length",
        kv_versions=np.zeros((0, 2), np.int32),
    )
    turn = replace(sound_turn(), completion=done, sampling=Sampling(max_tokens=0))
    assert turn_faults(turn, LIMITS, seed=SEED) == []
