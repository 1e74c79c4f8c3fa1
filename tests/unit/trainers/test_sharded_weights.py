"""Sharded weights in a world of one: the same code as over many ranks, without the other processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.errors import CheckpointError, DeadlineError
from headrace.models import float_residual
from headrace.models.loading import hollow_model, make_tiny_model
from headrace.models.lora import LoraSpec
from headrace.models.tensors import named_tensors
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers import shard_files, sharded_weights
from headrace.trainers.ranks import Ranks, join_ranks
from headrace.trainers.sharded_weights import ShardedWeights, _even_rows
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import TrainBatch

MakeModel = Callable[..., PreTrainedModel]
MakeBatch = Callable[..., TrainBatch]
ADAPTER = {"lora": LoraSpec(rank=4, alpha=8.0), "kl": "k3", "kl_coef": 0.1}


def trainer(model: PreTrainedModel, sender: Any, **settings: Any) -> TorchTrainer:
    settings = {"learning_rate": 3e-3, "row_tokens": 20, **settings}
    return TorchTrainer(model, sender=sender, ledger=TimeLedger(TRAINER_ACTIVITIES), **settings)


@pytest.mark.parametrize("tied", [True, False])
def test_a_world_of_one_trains_as_one_device(
    tied: bool, ranks: Ranks, make_model: MakeModel, make_batch: MakeBatch, sender: Any
) -> None:
    settings = {"kl": "k3", "kl_coef": 0.1, "grad_clip": 0.5}
    plain = trainer(make_model(tied=tied), sender, **settings)
    sharded = trainer(make_model(tied=tied), sender, ranks=ranks, **settings)
    # A forward without a backward, as the probe of a GPU's memory makes.
    sharded._weights.hidden(plain.prepare(make_batch(1))[0][0].tensors)
    for step in (1, 2, 3):
        expected, found = plain.step(make_batch(step)), sharded.step(make_batch(step))
        assert found.num_loss_tokens == expected.num_loss_tokens
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
    sharded.publish(3)
    names = list(sender.sent[3])
    plain.publish(3)
    assert names == list(sender.sent[3]) == list(named_tensors(plain.model))


def test_in_bf16_it_rounds_where_one_device_does(
    ranks: Ranks, make_model: MakeModel, make_batch: MakeBatch, sender: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which no longer holds where gated layers round their products, as they would without ``keep_float_residual``."""

    def logprobs(**settings: Any) -> torch.Tensor:
        core = trainer(make_model(), sender, compute_dtype="bf16", **settings)
        values = core._weights.values(core.prepare(make_batch(1))[0][0].tensors).logprobs_N
        # Held weights are let go of after a backward.
        values.sum().backward()
        return values.detach()

    plain = logprobs()
    torch.testing.assert_close(logprobs(ranks=ranks), plain, rtol=0, atol=1e-5)
    monkeypatch.setattr(float_residual, "is_gated", lambda _: False)
    assert (logprobs(ranks=ranks) - plain).abs().mean() > 1e-4


def test_held_weights_give_the_gradients_of_released_ones(
    ranks: Ranks, make_model: MakeModel, make_batch: MakeBatch, sender: Any
) -> None:
    norms = []
    for hold in (True, False):
        core = trainer(make_model(), sender, ranks=ranks)
        core._weights = ShardedWeights(make_model().float(), torch.float32, ranks=ranks, hold=hold)
        core.model = core._weights.model
        rows = trainer(make_model(), sender).prepare(make_batch(1))[0]
        assert len(rows) > 2
        core.accumulate(rows, before_update=True)
        norms.append(core._weights.clip_gradients(1e9))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("trained", [{}, ADAPTER], ids=["model", "adapter"])
def test_layers_may_be_recomputed(
    trained: dict[str, Any],
    hold: bool,
    ranks: Ranks,
    make_model: MakeModel,
    make_batch: MakeBatch,
    sender: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside an adapter the first layer's input has no gradient, since embeddings are frozen."""
    monkeypatch.setattr(sharded_weights, "_has_room", lambda *sizes: hold)
    plain, core = (trainer(make_model(), sender, **trained, **where) for where in ({}, {"ranks": ranks}))
    core.blocks.num_recomputed = 2
    for step in (1, 2):
        expected, found = plain.step(make_batch(step)), core.step(make_batch(step))
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)


def test_held_weights_are_gathered_once_for_all_rows(
    ranks: Ranks,
    make_model: MakeModel,
    make_batch: MakeBatch,
    sender: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathers: list[int] = []
    gather = FSDPParamGroup._to_unsharded
    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", lambda group: (gathers.append(1), gather(group))[1])
    rows = trainer(make_model(), sender).prepare(make_batch(1))[0]
    found = {}
    for hold in (True, False):
        core = trainer(make_model(), sender, ranks=ranks)
        core._weights = ShardedWeights(make_model().float(), torch.float32, ranks=ranks, hold=hold)
        core.model = core._weights.model
        gathers.clear()
        core.accumulate(rows, before_update=True)
        found[hold] = len(gathers)
    # Two layers and what lies around them; layers that were let go are gathered again for the backward.
    assert found == {True: 3, False: 5 * len(rows)}


def test_a_rank_that_meets_nobody_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(DeadlineError, match=r"trainer rank 0 could not meet the other 1 within 0\.5 s"):
        join_ranks(0, 2, device="cpu", meeting_point=tmp_path / "ranks", deadline_s=0.5)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_model_in_several_files_is_what_hugging_face_loads(
    family: Any, ranks: Ranks, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", family=family, vocab_size=32, hidden_size=32)
    whole = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    weights = ShardedWeights(model, torch.float32, ranks=ranks)
    target = tmp_path / "export"
    target.mkdir()
    shard_files.write_model(target, weights, lambda work: work(), file_bytes=20_000)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()
    assert loaded.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(loaded[name], tensor), name


def test_no_rank_holds_more_of_an_exported_model_than_a_file(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model", vocab_size=32, hidden_size=32, num_layers=8)
    weights = ShardedWeights(model, torch.float32, ranks=ranks)
    sizes = {name: weights.local(name).nbytes for name in weights.names()}
    alive: dict[int, int] = {}
    most = 0

    def gathered(name: str, local: torch.Tensor, *, to: int) -> torch.Tensor:
        """A copy, as a gather from other ranks makes it."""
        nonlocal most
        whole = local.clone()
        key = len(alive)
        alive[key] = whole.nbytes
        weakref.finalize(whole.untyped_storage(), alive.update, {key: 0})
        most = max(most, sum(alive.values()))
        return whole

    monkeypatch.setattr(weights, "gathered", gathered)
    (tmp_path / "export").mkdir()
    shard_files.write_model(tmp_path / "export", weights, lambda work: work(), file_bytes=70_000)
    assert len(alive) == len(sizes) and not any(alive.values())
    assert max(sizes.values()) < most <= 70_000 < sum(sizes.values()) / 3


def test_state_in_several_files_is_restored_whole(
    ranks: Ranks,
    make_model: MakeModel,
    make_batch: MakeBatch,
    sender: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_files.write_files, "__kwdefaults__", _smaller_files())
    settings = {"kl": "k3", "kl_coef": 0.1}
    first = trainer(make_model(), sender, ranks=ranks, **settings)
    first.step(make_batch(1))
    first.save(tmp_path)
    assert len(list(tmp_path.glob("optimizer-*.safetensors"))) > 1
    assert len(list(tmp_path.glob("reference-*.safetensors"))) > 1
    expected = first.step(make_batch(2))
    for resumed in (
        trainer(make_model(seed=7), sender, **settings),
        trainer(make_model(seed=7), sender, ranks=ranks, **settings),
    ):
        resumed.step(make_batch(1))
        assert resumed.load(tmp_path) == 1
        assert resumed.step(make_batch(2)).metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
    next(tmp_path.glob("optimizer-*.safetensors")).write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match="could not be restored"):
        trainer(make_model(), sender, ranks=ranks, **settings).load(tmp_path)


def _smaller_files() -> dict[str, Any]:
    return {**(shard_files.write_files.__kwdefaults__ or {}), "file_bytes": 10_000}


def test_a_hollow_model_has_the_shape_and_buffers_of_the_real_one(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, family="llama", vocab_size=32, hidden_size=32)
    hollow = hollow_model(tmp_path)
    assert list(named_tensors(hollow)) == list(named_tensors(model))
    assert [t.shape for t in hollow.parameters()] == [t.shape for t in model.parameters()]
    for own, other in zip(hollow.buffers(), model.buffers(), strict=True):
        assert torch.equal(own, other)


def test_rows_are_cut_as_fsdp_cuts_them() -> None:
    assert _even_rows(7, 2) == ((0, 4), (4, 7))
    assert _even_rows(3, 4) == ((0, 1), (1, 2), (2, 3), (3, 3))
    chunks = torch.arange(5).chunk(4)
    assert [stop - start for start, stop in _even_rows(5, 4)] == [*map(len, chunks), 0]
