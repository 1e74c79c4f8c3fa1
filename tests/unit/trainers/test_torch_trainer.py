from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.algos.catalog import LOSSES
from headrace.bench.step_workload import StepWorkload
from headrace.bench.train import random_samples
from headrace.errors import CheckpointError, ConfigError, InvariantError, TrainingError
from headrace.models.loading import make_tiny_model
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.logprobs import RowTensors, TokenValues
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import Sample, SamplingMask, TrainBatch

MakeModel = Callable[..., PreTrainedModel]
MakeBatch = Callable[..., TrainBatch]
Build = Callable[..., TorchTrainer]


@pytest.fixture
def build(make_model: MakeModel, sender: Any) -> Build:
    def make(model: PreTrainedModel | None = None, **settings: Any) -> TorchTrainer:
        ledger = TimeLedger(TRAINER_ACTIVITIES)
        settings = {"learning_rate": 3e-3, **settings}
        return TorchTrainer(model or make_model(), sender=sender, ledger=ledger, **settings)

    return make


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def sample_logprobs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    full = (model(input_ids=ids[None], use_cache=False).logits[0] / sample.temperature).log_softmax(-1)
    return torch.stack([full[t - 1, ids[t]] for t in np.flatnonzero(sample.loss_mask)])


def reference_loss(
    model: PreTrainedModel, batch: TrainBatch, settings: dict[str, Any], frozen: PreTrainedModel
) -> torch.Tensor:
    """A whole step's loss, token by token and sample by sample, with nothing of ours but the batch."""
    num_tokens = sum(int(s.loss_mask.sum()) for s in batch.samples)
    total = torch.zeros(())
    for sample in batch.samples:
        policy = sample_logprobs(model, sample)
        behavior = torch.from_numpy(sample.behavior_logprobs[sample.loss_mask])
        advantage = float(sample.advantages[sample.loss_mask][0])
        anchor, weight = behavior, torch.ones_like(policy)
        if settings.get("corrections") == ("tis",) or settings.get("loss") == "decoupled":
            anchor = policy.detach()
            weight = torch.clamp((policy.detach() - behavior).exp(), max=1.3)
        ratio = (policy - anchor).exp()
        clipped = torch.clamp(ratio, 0.8, 1.28)
        loss = -weight * torch.minimum(ratio * advantage, clipped * advantage)
        if settings.get("loss") == "cispo":
            loss = -torch.clamp(ratio.detach(), max=6.0) * advantage * policy
        if settings.get("kl") == "k3":
            gap = policy - sample_logprobs(frozen, sample).detach()
            loss = loss + settings["kl_coef"] * (policy - behavior).exp() * (torch.exp(-gap) - 1 + gap)
        if settings.get("aggregation") == "seq-mean-token-mean":
            total = total + loss.mean() / len(batch.samples)
        else:
            total = total + loss.sum() / num_tokens
    return total


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss": "cispo"},
        {"corrections": ("tis",), "options": {"tis.cap": 1.3}},
        {"loss": "decoupled", "options": {"decoupled.cap": 1.3}},
        {"aggregation": "seq-mean-token-mean"},
        {"kl": "k3", "kl_coef": 0.1},
    ],
    ids=lambda settings: "-".join(str(v) for v in settings.values()) or "ppo",
)
def test_a_step_equals_a_plain_loop_with_adamw(
    settings: dict[str, Any], build: Build, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    trainer = build(row_tokens=20, grad_clip=0.5, **settings)
    plain, frozen = make_model(), make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, betas=(0.9, 0.999), weight_decay=0.0)
    for step in (1, 2, 3):
        batch = make_batch(step, num_samples=8)
        result = trainer.step(batch)
        loss = reference_loss(plain, batch, settings, frozen)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert result.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=2e-5)
        assert result.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
        assert result.metrics["num_rows"] > 1
        assert (result.step, result.version, result.skipped) == (step, step, None)
    for name, parameter in trainer.model.named_parameters():
        # Adam turns a gradient's rounding error into a visible move where the gradient is nearly zero, so the
        # mean is compared, against moves of up to 9e-3.
        gap = (parameter - dict(plain.named_parameters())[name]).abs().mean()
        assert float(gap.detach()) < 1e-6, name


def row_gradients(trainer: TorchTrainer, batch: TrainBatch) -> dict[str, torch.Tensor]:
    for rows in trainer.prepare(batch):
        trainer.accumulate(rows, before_update=True)
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


COMPOSITIONS: list[dict[str, Any]] = [
    *({"loss": loss} for loss in LOSSES if loss not in ("ppo", "gspo")),
    {"corrections": ("icepop", "k3-filter"), "options": {"k3-filter.limit": 0.3}},
    {"corrections": ("mis", "opsm"), "loss": "cispo"},
    {
        "corrections": ("geo-filter", "max-k2-filter"),
        "options": {"geo-filter.low": 0.5, "geo-filter.high": 2.0},
    },
    {"loss": "gmpo", "corrections": ("seq-tis",)},
    {"loss": "gipo", "corrections": ("tis", "opsm"), "options": {"gipo.sigma": 0.5}},
    {"loss": "gspo", "corrections": ("seq-mis",)},
    {"loss": "aipo", "corrections": ("m2po",), "options": {"m2po.tau": 0.2}},
    {"loss": "decoupled", "options": {"decoupled.prox": "interpolated"}},
]


@pytest.mark.parametrize("settings", COMPOSITIONS, ids=lambda s: "-".join(map(str, s.values())))
def test_the_record_of_a_row_does_not_keep_its_graph(
    settings: dict[str, Any], build: Build, make_batch: MakeBatch
) -> None:
    trainer = build(**settings, kl="k3", kl_coef=0.1)
    (rows,) = trainer.prepare(make_batch(3, num_samples=4))
    for record in trainer.accumulate(rows, before_update=True):
        outcome, tokens = record.outcome, record.outcome.tokens
        kept = [record.policy_logprobs_N, record.entropy_N, outcome.loss, outcome.capped_N, tokens.loss_T]
        kept += [*outcome.values.values(), *outcome.masked.values()]
        kept += [tokens.clipped_low_T, tokens.clipped_high_T, tokens.masked_T]
        assert not any(value.requires_grad for value in kept)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("settings", COMPOSITIONS, ids=lambda s: "-".join(map(str, s.values())))
def test_every_composition_gives_the_same_gradients_however_rows_are_cut(
    settings: dict[str, Any], minibatches: int, build: Build, make_batch: MakeBatch
) -> None:
    batch = make_batch(3, num_samples=10)
    gradients = []
    for row_tokens in (10_000, 1):
        trainer = build(row_tokens=row_tokens, minibatches=minibatches, **settings)
        gradients.append(row_gradients(trainer, batch))
    assert any(float(gradient.abs().max()) > 1e-6 for gradient in gradients[0].values())
    for name in gradients[0]:
        torch.testing.assert_close(gradients[1][name], gradients[0][name], atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_many_small_rows_give_the_gradients_of_one_big_row(
    loss: str, aggregation: str, build: Build, make_batch: MakeBatch
) -> None:
    settings = {"loss": loss, "aggregation": aggregation, "max_tokens": 16, "clip_low": 0.5, "clip_high": 0.5}
    batch = make_batch(num_samples=12)
    whole = row_gradients(build(row_tokens=10_000, **settings), batch)
    split = row_gradients(build(row_tokens=1, **settings), batch)
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_a_shared_prompt_gives_the_gradients_of_an_unshared_one(loss: str, build: Build) -> None:
    workload = StepWorkload(num_groups=3, group_size=4, prompt_tokens=9, completion_tokens=5)
    samples = tuple(random_samples(workload, vocab_size=32))
    batch = TrainBatch(step=1, version=0, samples=samples)
    settings = {"loss": loss, "row_tokens": 40, "clip_low": 0.5, "clip_high": 0.5}
    trainers = [build(share_prefixes=share, **settings) for share in (False, True)]
    plain, shared = (row_gradients(trainer, batch) for trainer in trainers)
    assert [trainer.num_tokens for trainer in trainers] == [12 * 13, 3 * 8 + 12 * 5]
    for name in plain:
        gap = float((shared[name] - plain[name]).norm() / plain[name].norm())
        assert gap < 1e-5, (name, gap)


def test_prox_is_the_policy_before_the_first_minibatch(build: Build, make_batch: MakeBatch) -> None:
    trainer = build(loss="decoupled", minibatches=3)
    batch = make_batch(num_samples=6)
    parts = trainer.prepare(batch)
    assert [sum(row.inputs.num_sequences for row in rows) for rows in parts] == [2, 2, 2]
    found = torch.cat([row.inputs.prox_logprobs_N for rows in parts for row in rows])
    trainer.model.set_attn_implementation("eager")
    expected = torch.cat([sample_logprobs(trainer.model, sample) for sample in batch.samples])
    torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=0)


def test_minibatches_move_the_weights_several_times_for_one_version(
    build: Build, make_batch: MakeBatch
) -> None:
    trainer = build(minibatches=3)
    result = trainer.step(make_batch(num_samples=6))
    assert result.version == 1
    counts = {float(state["step"]) for state in trainer.optimizer.state.values()}
    assert counts == {3.0}


def test_losses_of_minibatches_are_averaged(build: Build, make_batch: MakeBatch) -> None:
    batch = make_batch(num_samples=6)
    alike = tuple(replace(batch.samples[0], group=i) for i in range(6))
    found = [
        build(minibatches=count, learning_rate=0.0).step(replace(batch, samples=alike)).metrics["loss"]
        for count in (1, 2, 3)
    ]
    assert found[0] != 0.0
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)


def test_a_row_that_fails_leaves_no_gradient_behind(
    build: Build, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(num_samples=6)
    expected = build(row_tokens=16).step(batch).metrics["grad_norm"]
    trainer, calls = build(row_tokens=16), []
    values = trainer._weights.values

    def fails_once(row: RowTensors) -> TokenValues:
        calls.append(row)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return values(row)

    monkeypatch.setattr(trainer._weights, "values", fails_once)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.step(batch)
    assert trainer.step(batch).metrics["grad_norm"] == expected


def test_a_checkpoint_that_lacks_a_file_is_refused(
    build: Build, make_batch: MakeBatch, tmp_path: Path
) -> None:
    trainer = build()
    trainer.step(make_batch())
    trainer.save(tmp_path)
    state = load_file(tmp_path / "optimizer.safetensors")
    (tmp_path / "optimizer.safetensors").unlink()
    save_file(state, tmp_path / "optimizer-00001-of-00002.safetensors")
    with pytest.raises(
        CheckpointError, match="1 of 2 files of optimizer are there; copy the checkpoint whole"
    ):
        build().load(tmp_path)


def test_metrics_against_their_definitions(
    build: Build, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    batch = make_batch(step=1, version=0, num_samples=6)
    aged = tuple(
        replace(s, versions=np.where(s.loss_mask, s.attempt - 1, -1).astype(np.int32)) for s in batch.samples
    )
    batch = replace(batch, samples=aged)
    metrics = build().step(batch).metrics
    gaps, fresh, sequence_weights, lags = [], [], [], []
    model = make_model()
    for sample in batch.samples:
        gap = (
            sample_logprobs(model, sample).detach().numpy() - sample.behavior_logprobs[sample.loss_mask]
        ).tolist()
        gaps += gap
        lags += [0 - int(v) for v in sample.versions[sample.loss_mask]]
        fresh += [abs(g) for g, v in zip(gap, sample.versions[sample.loss_mask], strict=True) if v == 0]
        sequence_weights.append(math.exp(sum(gap)))
    ess = sum(sequence_weights) ** 2 / sum(w * w for w in sequence_weights) / len(sequence_weights)
    expected = {
        "mismatch_mean": sum(fresh) / len(fresh),
        "mismatch_p99": sorted(fresh)[math.ceil(0.99 * len(fresh)) - 1],
        "mismatch_max": max(fresh),
        "behavior_kl": sum(math.exp(g) - 1 - g for g in gaps) / len(gaps),
        "effective_samples": ess,
        "lag_mean": sum(lags) / len(lags),
        "lag_max": 1.0,
        "fresh_fraction": len(fresh) / len(gaps),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3), name
    assert 0 < metrics["entropy"] < math.log(32)
    assert metrics["lag_share_0"] == pytest.approx(metrics["fresh_fraction"])
    assert metrics["lag_share_0"] + metrics["lag_share_1"] == pytest.approx(1.0)
    assert metrics["lag_share_2_3"] == metrics["lag_share_4_7"] == metrics["lag_share_8_up"] == 0.0
    assert metrics["version_span_mean"] == metrics["version_span_max"] == 0.0
    assert metrics["masked_by_clip"] == metrics["masked_fraction"]
    assert metrics["masked_fraction"] == metrics["clip_fraction_low"] + metrics["clip_fraction_high"] > 0


@pytest.mark.parametrize("offload", ["none", "first_moments", "moments"])
def test_resume_is_bit_exact(
    tmp_path: Path, build: Build, make_model: MakeModel, make_batch: MakeBatch, offload: str
) -> None:
    """Where the moments lie is not part of a checkpoint, nor of what is trained."""
    settings = {"kl": "k2", "kl_coef": 0.05, "schedule": "cosine", "total_steps": 8, "warmup_steps": 2}
    straight = build(**settings)
    settings["offload"] = offload
    for step in range(1, 7):
        straight.step(make_batch(step))
    first = build(**settings)
    for step in range(1, 4):
        first.step(make_batch(step))
    first.save(tmp_path)
    # Another start on purpose: weights, optimizer and reference must all come from the checkpoint.
    second = build(make_model(seed=9), **settings)
    assert second.load(tmp_path) == 3
    for step in range(4, 7):
        second.step(make_batch(step))
    assert_same_bits(weights(second), weights(straight))


def test_fused_experts_survive_a_checkpoint(tmp_path: Path, build: Build, make_batch: MakeBatch) -> None:
    """On disk every expert has a tensor of its own; in memory they are one."""
    first = build(make_tiny_model(tmp_path / "model", family="qwen3_moe", vocab_size=32))
    first.step(make_batch())
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    first.save(directory)
    second = build(make_tiny_model(tmp_path / "other", family="qwen3_moe", vocab_size=32, seed=1))
    second.load(directory)
    assert_same_bits(weights(second), weights(first))


def test_a_checkpoint_is_a_hugging_face_model_with_its_tokenizer(
    tmp_path: Path, build: Build, make_batch: MakeBatch
) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    trainer = build(tokenizer_dir=tmp_path / "tokenizer")
    trainer.step(make_batch())
    trainer.save(directory)
    assert (directory / "tokenizer.json").read_text() == "{}"
    assert "headrace" not in (directory / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert_same_bits(dict(loaded.state_dict()), weights(trainer))


def test_a_checkpoint_that_does_not_fit_is_refused(
    tmp_path: Path, build: Build, make_batch: MakeBatch
) -> None:
    with pytest.raises(CheckpointError, match="could not be restored"):
        build().load(tmp_path)
    build().save(tmp_path)
    with pytest.raises(CheckpointError, match="kl"):
        build(kl="k2", kl_coef=0.1).load(tmp_path)
    with pytest.raises(CheckpointError, match="could not be written"):
        build().save(tmp_path / "trainer.json" / "inside")


@pytest.mark.parametrize("broken", ["advantages", "behavior_logprobs"])
def test_a_step_that_is_not_finite_stops_and_changes_nothing(
    broken: str, build: Build, make_batch: MakeBatch
) -> None:
    trainer = build()
    before = weights(trainer)
    batch = make_batch()
    getattr(batch.samples[2], broken)[-1] = np.nan
    with pytest.raises(TrainingError, match=r"step 1: the loss is not finite.*on_nonfinite"):
        trainer.step(batch)
    assert_same_bits(weights(trainer), before)
    assert trainer.version == 0 and not trainer.optimizer.state
    assert trainer.step(make_batch()).version == 1


def test_a_step_that_is_not_finite_can_be_skipped_and_says_so(build: Build, make_batch: MakeBatch) -> None:
    trainer = build(on_nonfinite="skip")
    before = weights(trainer)
    batch = make_batch()
    batch.samples[2].advantages[-1] = np.inf
    result = trainer.step(batch)
    assert result.skipped is not None and "not finite" in result.skipped
    assert result.version == trainer.version == 1
    assert_same_bits(weights(trainer), before)
    assert trainer.step(make_batch(2)).skipped is None


def test_a_batch_without_loss_tokens_is_skipped(build: Build, make_batch: MakeBatch) -> None:
    batch = make_batch()
    for sample in batch.samples:
        sample.loss_mask[:] = False
    result = build().step(batch)
    assert (result.skipped, result.num_loss_tokens, result.version) == ("no loss tokens", 0, 1)


def test_publish_sends_the_current_weights_in_the_compute_dtype(
    build: Build, make_model: MakeModel, make_batch: MakeBatch, sender: Any
) -> None:
    trainer = build(make_model().to(torch.bfloat16), compute_dtype="bf16")
    trainer.step(make_batch())
    manifest = trainer.publish(1)
    assert manifest.version == 1
    sent = sender.sent[1]["model.layers.0.self_attn.q_proj.weight"]
    master = trainer.model.model.layers[0].self_attn.q_proj.weight
    assert sent.dtype == "BF16" and master.dtype == torch.float32
    restored = torch.from_numpy(sent.data).view(torch.bfloat16).view(sent.shape)
    assert torch.equal(restored, master.detach().to(torch.bfloat16))
    assert not torch.equal(restored.float(), master.detach())
    with pytest.raises(InvariantError, match="version 5"):
        trainer.publish(5)
    trainer.retire(1)
    assert not sender.sent


def test_every_second_has_an_activity(
    make_model: MakeModel, make_batch: MakeBatch, sender: Any, tmp_path: Path
) -> None:
    ticks = iter(range(10_000))
    ledger = TimeLedger(TRAINER_ACTIVITIES, clock=lambda: float(next(ticks)))
    trainer = TorchTrainer(make_model(), sender=sender, ledger=ledger, learning_rate=1e-3)
    assert ledger.current == "waiting-for-batch"
    trainer.step(make_batch())
    trainer.publish(1)
    trainer.save(tmp_path)
    seconds = ledger.seconds()
    assert ledger.current == "waiting-for-batch"
    assert all(seconds[name] > 0 for name in TRAINER_ACTIVITIES)
    assert sum(seconds.values()) == float(next(ticks) - 1)


def test_batches_out_of_order_or_untrainable_are_refused(build: Build, make_batch: MakeBatch) -> None:
    trainer = build()
    with pytest.raises(InvariantError, match="version 3"):
        trainer.step(make_batch(4))
    batch = make_batch()
    mask = SamplingMask(token_ids=np.zeros(0, np.int32), offsets=np.zeros(1, np.int64))
    for change, message in [({"temperature": 0.0}, "temperature"), ({"sampling_mask": mask}, "0 rows for")]:
        changed = replace(batch, samples=(replace(batch.samples[0], **change),))
        with pytest.raises(TrainingError, match=message):
            trainer.step(changed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "decoupled", "corrections": ("tis",)}, "twice"),
        ({"kl": "k3"}, "kl_coef"),
        ({"kl_coef": 0.1}, "no effect"),
        ({"schedule": "cosine"}, "total_steps"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "max_tokens"),
        ({"minibatches": 0}, "minibatches"),
        ({"corrections": ("tis",), "options": {"tis.cap": 0.0}}, "tis.cap"),
        ({"guard": "loud"}, "guard"),
        ({"kl": "k1", "kl_coef": 0.1}, "zero in expectation"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str, build: Build) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**settings)


def test_bf16_trains_close_to_float32(build: Build, make_batch: MakeBatch) -> None:
    exact, rough = build(), build(compute_dtype="bf16")
    for step in (1, 2):
        exact.step(make_batch(step))
        rough.step(make_batch(step))
    gap = max(float((exact.model.state_dict()[n] - t).abs().max()) for n, t in weights(rough).items())
    assert 0 < gap < 0.02
