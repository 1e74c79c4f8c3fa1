"""From an engine's kept sets to the trainer's ratio, KL and metrics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace import wire
from headrace.data.dealing import deal
from headrace.data.samples import build_samples
from headrace.engines.make import torch_engine
from headrace.errors import TrainingError
from headrace.timekeeping import ENGINE_ACTIVITIES, TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import (
    Episode,
    EpisodeGroup,
    Request,
    Sampling,
    SamplingMask,
    Task,
    TrainBatch,
    Trajectory,
    Turn,
)

CUTS = {"top-p": {"top_p": 0.6}, "top-k": {"top_k": 5}, "min-p": {"min_p": 0.3}}


def sampled_batch(model, *, mixed: bool = False, **cut) -> TrainBatch:
    """Two groups of three attempts, drawn by an engine with these weights. ``mixed``: one attempt of each is not
    cut."""
    engine = torch_engine(model, ledger=TimeLedger(ENGINE_ACTIVITIES), max_running=8, kv_tokens=512)
    turns, done = {}, {}
    for group in range(2):
        prompt_ids = np.random.default_rng(group).integers(0, 32, 7 + group).astype(np.int32)
        for attempt in range(3):
            settings = {} if mixed and attempt == 1 else cut
            request = Request(
                id=f"{group}/{attempt}",
                prompt_ids=prompt_ids,
                sampling=Sampling(max_tokens=9, temperature=0.9, **settings),
                seed=10 * group + attempt,
            )
            engine.submit(request)
            turns[request.id] = request
    while engine.has_work:
        done.update(engine.step())
    samples = []
    for group in range(2):
        episodes = []
        for attempt in range(3):
            request = turns[f"{group}/{attempt}"]
            turn = Turn(
                prompt_ids=request.prompt_ids,
                completion=done[request.id],
                sampling=request.sampling,
                seed=request.seed,
                engine="engine-0",
            )
            episodes.append(
                Episode(
                    group=group,
                    attempt=attempt,
                    task=Task(id=str(group), prompt=""),
                    trajectories=(Trajectory(turns=(turn,), text=""),),
                )
            )
        scored = EpisodeGroup(
            group=group, task=episodes[0].task, episodes=tuple(episodes), returns=(1.0, 0.0, 0.5)
        )
        samples += build_samples(scored, [0.7, -0.9, 0.2])
    return TrainBatch(step=1, version=0, samples=tuple(samples))


def without_masks(batch: TrainBatch) -> TrainBatch:
    return replace(batch, samples=tuple([replace(s, sampling_mask=None) for s in batch.samples]))


def trainer(model, **settings) -> TorchTrainer:
    settings = {"learning_rate": 1e-3, **settings}
    return TorchTrainer(model, sender=None, ledger=TimeLedger(TRAINER_ACTIVITIES), **settings)


@pytest.mark.parametrize("share_prefixes", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_the_ratio_at_equal_weights_is_1_with_the_mask_and_the_kept_mass_without(
    make_model, cut, share_prefixes
):
    batch = sampled_batch(make_model(), **CUTS[cut])
    one = trainer(make_model(), share_prefixes=share_prefixes)
    (rows,) = one.prepare(batch)
    (record,) = one.accumulate(rows, before_update=True)
    ratio = (record.policy_logprobs_N - record.inputs.behavior_logprobs_N).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
    plain = trainer(make_model(), share_prefixes=share_prefixes)
    (rows,) = plain.prepare(without_masks(batch))
    (unmasked,) = plain.accumulate(rows, before_update=True)
    ratio = (unmasked.policy_logprobs_N - unmasked.inputs.behavior_logprobs_N).exp()
    torch.testing.assert_close(ratio, record.kept_mass_N, atol=1e-5, rtol=0)
    assert float(ratio.min()) < 0.95
    # The set's own entropy, not the model's.
    assert float(record.entropy_N.mean()) < float(unmasked.entropy_N.mean())

    metrics = trainer(make_model()).step(batch).metrics
    assert metrics["mismatch_max"] < 1e-5 and metrics["truncated_fraction"] == 1.0
    assert metrics["kept_mass"] == pytest.approx(float(record.kept_mass_N.mean()), abs=1e-6)
    assert "kept_mass" not in trainer(make_model()).step(without_masks(batch)).metrics


def test_a_batch_of_both_kinds_counts_its_cut_tokens(make_model):
    batch = sampled_batch(make_model(), mixed=True, top_p=0.6)
    metrics = trainer(make_model()).step(batch).metrics
    cut = sum(s.num_loss_tokens for s in batch.samples if s.sampling_mask is not None)
    assert metrics["truncated_fraction"] == pytest.approx(cut / sum(s.num_loss_tokens for s in batch.samples))
    assert metrics["mismatch_max"] < 1e-5 and 0.5 < metrics["kept_mass"] < 1


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_the_reference_is_valued_over_the_same_sets(make_model, kl):
    """At equal weights the divergence is 0 over any set; a reference over the whole vocabulary would not be."""
    batch = sampled_batch(make_model(), top_k=4)
    metrics = trainer(make_model(), kl=kl, kl_coef=0.1).step(batch).metrics
    assert abs(metrics["kl"]) < 1e-9
    other = trainer(make_model(seed=1), kl=kl, kl_coef=0.1)
    engine = torch_engine(
        make_model(seed=1), ledger=TimeLedger(ENGINE_ACTIVITIES), max_running=1, kv_tokens=64
    )
    scored = [
        replace(s, ref_logprobs=engine.score([s.token_ids], s.temperature, masks=[s.sampling_mask])[0])
        for s in batch.samples
    ]
    lean = trainer(make_model(), kl=kl, kl_coef=0.1, keep_reference=False)
    kept = trainer(make_model(), kl=kl, kl_coef=0.1)
    kept._reference = other._reference
    expected, got = kept.step(batch).metrics, lean.step(replace(batch, samples=tuple(scored))).metrics
    assert expected["kl"] > 1e-3
    for name in ("loss", "kl", "grad_norm"):
        assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_prox_is_valued_over_the_same_sets(make_model):
    """With minibatches the extra pass must see the masks, or the first ratios would not be 1."""
    batch = sampled_batch(make_model(), top_p=0.6)
    one = trainer(make_model(), minibatches=2, loss="decoupled")
    for rows in one.prepare(batch):
        for row in rows:
            found = row.inputs.prox_logprobs_N
            torch.testing.assert_close(found, row.inputs.behavior_logprobs_N, atol=1e-5, rtol=0)


def test_masks_travel_to_the_ranks_with_their_samples(make_model):
    batch = sampled_batch(make_model(), mixed=True, top_k=6)
    shares = wire.decode(wire.encode(deal(batch, num_ranks=2, num_minibatches=1)))
    dealt = {(s.group, s.attempt): s for share in shares for part in share for s in part.samples}
    assert len(dealt) == len(batch.samples)
    for sample in batch.samples:
        mask, got = sample.sampling_mask, dealt[sample.group, sample.attempt].sampling_mask
        assert (mask is None) == (got is None)
        if mask is not None:
            np.testing.assert_array_equal(got.token_ids, mask.token_ids)
            np.testing.assert_array_equal(got.offsets, mask.offsets)


def test_a_mask_that_does_not_fit_the_model_is_refused_by_name(make_model):
    batch = sampled_batch(make_model(), top_k=4)
    sample = batch.samples[0]
    mask = sample.sampling_mask
    beyond = mask.token_ids.copy()
    beyond[-1] = 32
    strange = [
        (replace(mask, token_ids=beyond), r"sample 0/0.*outside the vocabulary of 32"),
        (
            SamplingMask(token_ids=(sample.token_ids + 1) % 32, offsets=np.arange(len(sample.token_ids) + 1)),
            r"sample 0/0.*does not hold the sampled token",
        ),
    ]
    for wrong, text in strange:
        changed = (replace(sample, sampling_mask=wrong), *batch.samples[1:])
        with pytest.raises(TrainingError, match=text):
            trainer(make_model()).step(replace(batch, samples=changed))
