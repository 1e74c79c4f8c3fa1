"""A sharded adapter in a world of one: the same code as over many ranks, without the other processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from headrace.errors import CheckpointError, ConfigError, TrainingError
from headrace.models.loading import hollow_model, load_model, make_tiny_model
from headrace.models.lora import LoraSpec
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.ranks import Ranks
from headrace.trainers.sharded_adapter import ShardedAdapterWeights
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import TrainBatch

MakeModel = Callable[..., PreTrainedModel]
MakeBatch = Callable[..., TrainBatch]
SPEC = LoraSpec(rank=4, alpha=6.0)
DORA = LoraSpec(rank=4, alpha=6.0, dora=True)
SPECS = pytest.mark.parametrize("spec", [SPEC, DORA], ids=["lora", "dora"])


def trainer(model: PreTrainedModel, sender: Any, spec: LoraSpec = SPEC, **settings: Any) -> TorchTrainer:
    settings = {"learning_rate": 1e-2, "row_tokens": 20, "lora": spec, **settings}
    return TorchTrainer(model, sender=sender, ledger=TimeLedger(TRAINER_ACTIVITIES), **settings)


def sent(core: TorchTrainer, sender: Any) -> tuple[list[tuple[Any, ...]], dict[str, bytes]]:
    manifest = core.publish(core.version)
    assert (manifest.kind, manifest.policy) == ("adapter", "policy")
    blobs = sender.sent[core.version]
    return [(b.name, b.dtype, b.shape) for b in blobs.values()], {n: bytes(b.data) for n, b in blobs.items()}


@SPECS
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_world_of_one_trains_as_one_device(
    spec: LoraSpec, minibatches: int, ranks: Ranks, make_model: MakeModel, make_batch: MakeBatch, sender: Any
) -> None:
    """With a reference, which turns the adapter off while the weights are gathered."""
    settings = {"kl": "k3", "kl_coef": 0.1, "grad_clip": 0.5, "minibatches": minibatches}
    plain = trainer(make_model(), sender, spec, **settings)
    sharded = trainer(make_model(), sender, spec, ranks=ranks, **settings)
    for step in (1, 2, 3):
        expected, found = plain.step(make_batch(step)), sharded.step(make_batch(step))
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
        assert found.metrics["kl"] > 0 or step == 1
    assert sent(sharded, sender)[0] == sent(plain, sender)[0]


@SPECS
def test_only_the_adapter_is_trained_kept_and_sliced_in_float32(
    spec: LoraSpec, ranks: Ranks, make_model: MakeModel, make_batch: MakeBatch, sender: Any
) -> None:
    before = {name: tensor.bfloat16() for name, tensor in make_model().state_dict().items()}
    plain = trainer(make_model(), sender, spec, compute_dtype="bf16")
    sharded = trainer(make_model(), sender, spec, compute_dtype="bf16", ranks=ranks)
    expected, found = plain.step(make_batch(1)), sharded.step(make_batch(1))
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-2)
    assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-2)
    assert list(dict(sharded.model.named_parameters())) == list(dict(plain.model.named_parameters()))
    assert sharded.num_weights == plain.num_weights
    assert {p.dtype for p in sharded.model.parameters()} == {torch.float32}
    after = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in sharded.policy.state_dict().items()
        if "lora_" not in name
    }
    for name, tensor in before.items():
        assert isinstance(after[name], DTensor) and torch.equal(after[name].to_local(), tensor), name


def test_weights_are_held_where_there_is_room_for_the_model_and_the_adapters_gradients(
    ranks: Ranks, make_model: MakeModel, make_batch: MakeBatch, sender: Any
) -> None:
    norms = []
    for hold in (True, False):
        core = trainer(make_model(), sender, ranks=ranks)
        core._weights = ShardedAdapterWeights(make_model(), torch.float32, SPEC, ranks=ranks, hold=hold)
        core.model = core._weights.model
        rows = trainer(make_model(), sender).prepare(make_batch(1))[0]
        core.accumulate(rows, before_update=True)
        norms.append(core._weights.clip_gradients(1e9))
        num = sum(p.numel() for p in make_model().parameters())
        assert core._weights.held_bytes == hold * (2 * num + 6 * core.num_weights)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@SPECS
def test_files_and_bundles_are_those_of_one_device(
    spec: LoraSpec,
    ranks: Ranks,
    make_model: MakeModel,
    make_batch: MakeBatch,
    sender: Any,
    tmp_path: Path,
) -> None:
    written, again = tmp_path / "written", tmp_path / "again"
    written.mkdir(), again.mkdir()
    sharded = trainer(make_model(), sender, spec, ranks=ranks)
    sharded.step(make_batch(1))
    sharded.save(written)
    plain = trainer(make_model(), sender, spec)
    assert plain.load(written) == 1
    plain.save(again)
    for name in ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"):
        assert (written / name).read_bytes() == (again / name).read_bytes(), name
    assert {p.name for p in written.iterdir()} == {p.name for p in again.iterdir()}
    assert sent(sharded, sender) == sent(plain, sender)
    resumed = trainer(make_model(), sender, spec, ranks=ranks)
    resumed.step(make_batch(1))
    assert resumed.load(again) == 1
    expected = plain.step(make_batch(2)).metrics
    for core in (sharded, resumed):
        assert core.step(make_batch(2)).metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    peft.PeftModel.from_pretrained(make_model(), written)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_adapters_of_experts(
    family: Any, ranks: Ranks, make_batch: MakeBatch, sender: Any, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path / "model", family=family, vocab_size=32, hidden_size=32, init_std=0.15)
    spec = LoraSpec(rank=2, alpha=4.0, targets=("all-linear", "experts"))
    plain = trainer(load_model(tmp_path / "model"), sender, spec)
    sharded = trainer(load_model(tmp_path / "model"), sender, spec, ranks=ranks)
    for step in (1, 2, 3):
        expected, found = plain.step(make_batch(step)), sharded.step(make_batch(step))
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
    sharded.save(tmp_path)
    plain.load(tmp_path)
    assert sent(sharded, sender) == sent(plain, sender)


def test_an_adapter_that_is_not_finite_is_never_published(
    ranks: Ranks, make_model: MakeModel, sender: Any
) -> None:
    core = trainer(make_model(), sender, ranks=ranks)
    with torch.no_grad():
        core._weights.local(core._weights.names()[0])[0, 0] = np.inf
    with pytest.raises(TrainingError, match="not finite"):
        core.publish(0)


def test_a_checkpoint_of_another_rank_is_refused(
    ranks: Ranks, make_model: MakeModel, sender: Any, tmp_path: Path
) -> None:
    trainer(make_model(), sender).save(tmp_path)
    with pytest.raises(CheckpointError, match="lora settings"):
        trainer(make_model(), sender, LoraSpec(rank=2, alpha=6.0), ranks=ranks).load(tmp_path)


def test_moments_alone_stay_on_the_device(ranks: Ranks, make_model: MakeModel, sender: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.offload"):
        trainer(make_model(), sender, ranks=ranks, offload="moments")


def test_all_is_not_kept_on_the_host_without_a_rank_of_its_own(make_model: MakeModel, sender: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.offload: all"):
        trainer(make_model(), sender, offload="all")


def test_an_adapter_is_trained_on_a_model_that_is_another_adapter(
    ranks: Ranks, make_model: MakeModel, sender: Any, tmp_path: Path
) -> None:
    """The first rank merges it; the others need the shape alone."""
    base = make_model()
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    trainer(base, sender).save(tmp_path)
    shapes = [parameter.shape for parameter in load_model(tmp_path).parameters()]
    assert [parameter.shape for parameter in hollow_model(tmp_path).parameters()] == shapes


def test_hollow_models_have_the_dtype_that_is_computed_in(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, family="llama", vocab_size=32, hidden_size=32)
    hollow = hollow_model(tmp_path, dtype="bfloat16")
    assert {parameter.dtype for parameter in hollow.parameters()} == {torch.bfloat16}
    loaded = load_model(tmp_path, dtype="bfloat16")
    assert [buffer.dtype for buffer in hollow.buffers()] == [buffer.dtype for buffer in loaded.buffers()]
