"""Given tokens scored over the sets they were drawn from, on both executors."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from headrace import wire
from headrace.data import masks
from headrace.data.samples import build_samples, sequence_masks
from headrace.engines.driver import EngineDriver
from headrace.errors import TaskError
from headrace.launch.role_methods import ENGINE
from headrace.runtime.reference import ReferencePolicy
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import Episode, EpisodeGroup, SamplingMask, Task, Trajectory, Turn

VOCAB = 61
CUTS = ({"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.02}, {})


def drawn(make_engine, run_engine, make_request, **settings):
    """Requests, their completions, and each sequence with the mask of all its tokens."""
    requests = [
        make_request(f"r{i}", prompt=9 + i, max_tokens=12, temperature=0.8, **cut)
        for i, cut in enumerate(CUTS)
    ]
    done = run_engine(make_engine(**settings), *requests)
    completions = [done[request.id] for request in requests]
    sequences = [
        np.concatenate([request.prompt_ids, completion.token_ids])
        for request, completion in zip(requests, completions, strict=True)
    ]
    kept = [
        None
        if completion.sampling_mask is None
        else masks.join([masks.whole(len(request.prompt_ids)), completion.sampling_mask])
        for request, completion in zip(requests, completions, strict=True)
    ]
    return requests, completions, sequences, kept


@pytest.mark.parametrize("prefill_tokens", [4, 512], ids=["chunks", "whole"])
@pytest.mark.parametrize("kind", ["plain", "device"])
def test_scores_over_the_kept_sets_are_what_was_sampled_with(
    make_engine, make_device_engine, run_engine, make_request, kind, prefill_tokens
):
    requests, completions, sequences, kept = drawn(make_engine, run_engine, make_request)
    engine = (make_engine if kind == "plain" else make_device_engine)(prefill_tokens=prefill_tokens)
    scored = engine.score(sequences, 0.8, masks=kept)
    whole = engine.score(sequences, 0.8)
    for request, completion, over_set, over_all, mask in zip(
        requests, completions, scored, whole, kept, strict=True
    ):
        start = len(request.prompt_ids)
        np.testing.assert_allclose(over_set[start:], completion.logprobs, atol=1e-5)
        np.testing.assert_allclose(over_set[:start], over_all[:start], atol=1e-6)
        if mask is not None:
            assert (over_set[start:] >= over_all[start:] - 1e-6).all()
            assert (over_set[start:] > over_all[start:] + 1e-3).any()


def test_a_mask_that_does_not_fit_is_named_and_frees_its_memory(make_engine, run_engine, make_request):
    _, _, sequences, kept = drawn(make_engine, run_engine, make_request)
    engine, ids, mask = make_engine(), sequences[0], kept[0]
    changed = mask.token_ids.copy()
    changed[-1] = VOCAB
    faults = [
        (masks.cut(mask, 0, 5), "5 rows for"),
        (replace(mask, token_ids=changed), f"outside the vocabulary of {VOCAB}"),
        (masks.join([masks.cut(mask, 0, len(ids) - 1), SamplingMask(
            token_ids=np.array([(ids[-1] + 1) % VOCAB], np.int32), offsets=np.array([0, 1]))]),
         "does not hold the sampled token"),
    ]  # fmt: skip
    free = engine._pool.num_free
    for wrong, text in faults:
        with pytest.raises(TaskError, match=text):
            engine.score([ids], masks=[wrong])
    assert engine._pool.num_free == free


def test_the_reference_of_a_group_is_computed_over_the_same_sets(make_engine, run_engine, make_request):
    requests, completions, _, kept = drawn(make_engine, run_engine, make_request)
    task = Task(id="0", prompt="")
    episodes = tuple(
        Episode(group=0, attempt=i, task=task, trajectories=(Trajectory(text="", turns=(Turn(
            prompt_ids=request.prompt_ids, completion=completion, sampling=request.sampling, seed=0, engine="e"),),
        ),))
        for i, (request, completion) in enumerate(zip(requests, completions, strict=True))
    )  # fmt: skip
    for mask, expected in zip(sequence_masks(episodes), kept, strict=True):
        assert (mask is None) == (expected is None)
        if mask is not None:
            np.testing.assert_array_equal(mask.token_ids, expected.token_ids)
            np.testing.assert_array_equal(mask.offsets, expected.offsets)

    class OverTheWire:
        """What a proxy sends and a worker answers, without the processes between them."""

        name = "reference"

        def __init__(self, engine) -> None:
            self._engine = engine

        async def score(self, token_ids, *, temperature=1.0, policy="policy", masks=None):
            sent = wire.encode(
                [list(token_ids), temperature, policy, *([] if masks is None else [list(masks)])]
            )
            return wire.decode(wire.encode(await ENGINE["score"](self._engine, wire.decode(sent), None)))

    async def main():
        driver = EngineDriver(make_engine(), None, name="r", ledger=TimeLedger(ENGINE_ACTIVITIES))
        return await ReferencePolicy(OverTheWire(driver), deadline_s=60.0).logprobs(0, episodes)

    answers = asyncio.run(main())
    group = EpisodeGroup(
        group=0, task=task, episodes=episodes, returns=(0.0,) * len(episodes), ref_logprobs=answers
    )
    for sample in build_samples(group, np.zeros(len(episodes))):
        sampled = sample.loss_mask
        np.testing.assert_allclose(sample.ref_logprobs[sampled], sample.behavior_logprobs[sampled], atol=1e-5)
