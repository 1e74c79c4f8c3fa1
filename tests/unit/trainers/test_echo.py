"""Cross-entropy on what an environment answered: against a plain forward, and without a trace in the policy's part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.data.packing import pack
from headrace.errors import ConfigError
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.distilling import Distillation
from headrace.trainers.ranks import join_ranks
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import NO_KV, Sample, SamplingMask, TrainBatch

VOCAB = 32
COEF = 0.1
ITS_OWN = {"environment_loss", "environment_tokens", "loss", "grad_norm"}


def make_sample(rng, group, attempt, prompt, lengths, *, masked=False):
    """Tokens sampled, answered, sampled, ... of these lengths behind the prompt."""
    kinds = np.concatenate([np.full(n, i % 2 == 0) for i, n in enumerate(lengths)])
    mask = np.concatenate([np.zeros(len(prompt), bool), kinds])
    token_ids = np.concatenate([prompt, rng.integers(0, VOCAB, len(kinds))]).astype(np.int32)
    kept = [np.unique([t, *rng.choice(VOCAB, 9)]) if m else [] for t, m in zip(token_ids, mask, strict=True)]
    offsets = np.cumsum([0, *map(len, kept)]).astype(np.int64)
    cut = SamplingMask(token_ids=np.concatenate(kept).astype(np.int32), offsets=offsets)
    return Sample(
        group=group,
        attempt=attempt,
        token_ids=token_ids,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -rng.uniform(2.5, 4.0, len(mask)), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
        temperature=0.7,
        kv_versions=NO_KV,
        sampling_mask=cut if masked else None,
    )


def make_turns(*, masked=False, one_turn=False):
    rng = np.random.default_rng(5)
    samples = []
    for group in range(3):
        prompt = rng.integers(0, VOCAB, 12)
        for attempt in range(3):
            num_parts = 1 if one_turn else (1, 3, 5)[attempt]
            lengths = rng.integers(1, 5, num_parts)
            samples.append(make_sample(rng, group, attempt, prompt, lengths, masked=masked))
    return TrainBatch(step=1, version=0, samples=tuple(samples))


def answered(sample):
    """Places of the environment's tokens, found one by one."""
    first = sample.loss_mask.tolist().index(True)
    return [t for t in range(first, sample.num_tokens) if not sample.loss_mask[t]]


@pytest.fixture
def build(make_model, sender):
    def make(**settings):
        settings = {"learning_rate": 3e-3, "row_tokens": 40, "grad_clip": None, **settings}
        return TorchTrainer(make_model(), sender=sender, ledger=TimeLedger(TRAINER_ACTIVITIES), **settings)

    return make


def gradients(trainer, batch):
    records = [r for rows in trainer.prepare(batch) for r in trainer.accumulate(rows, before_update=True)]
    return records, {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def plain_entropy(model, batch, weights=None):
    """Mean over all environment tokens, from the model's own forward over each sample alone."""
    values = []
    for sample in batch.samples:
        ids = torch.from_numpy(sample.token_ids).long()
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
        values += [-logprobs[t - 1, ids[t]] for t in answered(sample)]
    return torch.stack(values).mean(), len(values)


@pytest.mark.parametrize("masked", [False, True], ids=["whole vocabulary", "kept sets"])
@pytest.mark.parametrize("share_prefixes", [False, True])
@pytest.mark.parametrize("row_tokens", [1, 40, 10_000])
def test_value_and_gradient_are_those_of_a_plain_forward(
    row_tokens, share_prefixes, masked, build, make_model
):
    batch, model = make_turns(masked=masked), make_model()
    settings = {"row_tokens": row_tokens, "share_prefixes": share_prefixes}
    entropy, num_tokens = plain_entropy(model, batch)
    entropy.backward()
    _, without = gradients(build(**settings), batch)
    trainer = build(echo_coef=COEF, **settings)
    records, with_it = gradients(trainer, batch)
    for name, parameter in model.named_parameters():
        expected = without[name] + COEF * parameter.grad
        torch.testing.assert_close(with_it[name], expected, atol=2e-6, rtol=1e-4, msg=name)
    metrics = trainer._echo.metrics(records)
    assert metrics["environment_tokens"] == num_tokens > 0
    assert metrics["environment_loss"] == pytest.approx(float(entropy.detach()), rel=1e-5)


@pytest.mark.parametrize("masked", [False, True], ids=["whole vocabulary", "kept sets"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kl": "k3", "kl_coef": 0.2},
        {"loss": "gspo", "corrections": ("seq-tis",), "share_prefixes": True},
        {"aggregation": "seq-mean-token-mean", "corrections": ("m2po",), "options": {"m2po.tau": 0.2}},
    ],
    ids=["ppo", "kl", "gspo", "m2po"],
)
def test_nothing_of_the_sampled_tokens_changes_by_a_bit(settings, masked, build):
    batch = make_turns(masked=masked)
    (plain, _), (echoing, _) = (
        gradients(build(**settings, **more), batch) for more in ({}, {"echo_coef": 3.0})
    )
    for one, other in zip(plain, echoing, strict=True):
        assert torch.equal(one.policy_logprobs_N, other.policy_logprobs_N)
        assert torch.equal(one.inputs.weights_N, other.inputs.weights_N)
        assert all(
            torch.equal(value, other.outcome.values[name]) for name, value in one.outcome.values.items()
        )
    with_it, without = build(echo_coef=3.0, **settings).step(batch), build(**settings).step(batch)
    assert with_it.num_loss_tokens == without.num_loss_tokens
    figures = {name: value for name, value in with_it.metrics.items() if name not in ITS_OWN}
    assert figures == {name: value for name, value in without.metrics.items() if name not in ITS_OWN}
    added = with_it.metrics["loss"] - without.metrics["loss"]
    assert added == pytest.approx(3.0 * with_it.metrics["environment_loss"], rel=1e-4)


def test_attempts_of_one_turn_have_none_and_say_so(build):
    batch = make_turns(one_turn=True)
    with_it, without = build(echo_coef=COEF).step(batch), build().step(batch)
    told = {"environment_loss": 0.0, "environment_tokens": 0.0}
    assert with_it.metrics == {**without.metrics, **told}


def test_aggregation_is_the_steps_own_over_these_tokens_alone(build, make_model):
    batch = make_turns()
    trainer = build(echo_coef=COEF, aggregation="seq-mean-token-mean")
    metrics = trainer.step(batch).metrics
    means = []
    for sample in batch.samples:
        if answered(sample):
            entropy, _ = plain_entropy(make_model(), replace(batch, samples=(sample,)))
            means.append(float(entropy.detach()))
    assert metrics["environment_loss"] == pytest.approx(sum(means) / len(means), rel=1e-5)


def test_it_is_learned(build):
    trainer, batch = build(echo_coef=1.0, learning_rate=1e-2), make_turns()
    losses = []
    for step in range(1, 9):
        metrics = trainer.step(replace(batch, step=step, version=step - 1)).metrics
        losses.append(metrics["environment_loss"])
    assert losses[-1] < 0.7 * losses[0]


def test_sharded_weights_give_the_same_step(build, make_model, sender, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ranks = join_ranks(0, 1, device="cpu", meeting_point=tmp_path / "ranks", deadline_s=30.0)
    batch = make_turns()
    found, expected = (build(echo_coef=COEF, **where).step(batch) for where in ({"ranks": ranks}, {}))
    ranks.close()
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)


def test_bf16_computes_it_too(build):
    trainer = build(echo_coef=COEF, compute_dtype="bf16")
    exact = build(echo_coef=COEF).step(make_turns()).metrics["environment_loss"]
    assert trainer.step(make_turns()).metrics["environment_loss"] == pytest.approx(exact, rel=0.02)


def test_a_row_knows_what_lies_between_sampled_tokens():
    samples = make_turns().samples
    for share_prefixes in (False, True):
        for row in pack(samples, row_tokens=40, share_prefixes=share_prefixes):
            counts = np.bincount(row.sequence[row.environment_mask], minlength=row.num_sequences)
            assert counts.tolist() == [len(answered(samples[i])) for i in row.sample_index]


def test_what_cannot_be_valued_together_is_refused(build):
    with pytest.raises(ConfigError, match="divergence 'forward'"):
        build(echo_coef=COEF, distillation=Distillation(divergence="forward"))
    with pytest.raises(ConfigError, match="echo_coef"):
        build(echo_coef=-1.0)
