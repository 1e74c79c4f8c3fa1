"""Moments in host memory, as a trainer's steps have them come and go."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers import torch_trainer
from headrace.trainers.placement import HOST_MOMENTS, Offload
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import TrainBatch

MakeModel = Callable[..., PreTrainedModel]
MakeBatch = Callable[..., TrainBatch]
Build = Callable[..., TorchTrainer]


@pytest.fixture
def build(make_model: MakeModel, sender: Any) -> Build:
    def make(**settings: Any) -> TorchTrainer:
        return TorchTrainer(make_model(), sender=sender, ledger=TimeLedger(TRAINER_ACTIVITIES), **settings)

    return make


def test_moments_are_brought_in_the_backward_of_a_steps_last_row(
    build: Build, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    trainer = build(offload="moments", row_tokens=16)
    monkeypatch.setattr(trainer.optimizer, "bring", lambda room: log.append("brought"))
    monkeypatch.setattr(trainer.optimizer, "settle", lambda: log.append("settled"))
    value = trainer._weights.values
    monkeypatch.setattr(trainer._weights, "values", lambda row: (log.append("row"), value(row))[1])
    result = trainer.step(make_batch())
    num_rows = int(result.metrics["num_rows"])
    assert num_rows > 2
    # Before whatever is computed; and once for each of two layers.
    assert log == ["settled", "settled", *["row"] * num_rows, "brought", "brought"]
    log.clear()
    for rows in trainer.prepare(make_batch(step=2)):
        trainer.accumulate(rows, before_update=True, update_follows=False)
    assert "brought" not in log


def test_moments_get_no_memory_that_gradients_will_take(
    build: Build, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the same backward makes: all of them where it is the only one before an update."""
    told: list[int] = []

    def telling_room(*_: object, gradient_bytes: int, **__: object) -> AbstractContextManager[None]:
        told.append(gradient_bytes)
        return nullcontext()

    for row_tokens in (10_000, 16):
        trainer = build(offload="moments", row_tokens=row_tokens)
        monkeypatch.setattr(trainer.blocks, "telling_room", telling_room)
        trainer.step(make_batch())
    assert told == [4 * sum(weight.numel() for weight in trainer.model.parameters()), 0]


@pytest.mark.parametrize("offload", ["none", "first_moments", "moments"])
def test_room_is_kept_for_the_moments_that_stay(
    build: Build, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, offload: Offload
) -> None:
    """Until the first step has made them."""
    reserved: list[int] = []

    def fit(num_tokens: int, *, reserved_bytes: int, slope_bytes: int) -> None:
        reserved.append(reserved_bytes)

    trainer = build(offload=offload)
    monkeypatch.setattr(trainer.blocks, "fit", fit)
    batch = make_batch()
    trainer.step(batch)
    trainer.step(replace(batch, step=2, version=1))
    num_staying = 2 - len(HOST_MOMENTS.get(offload, ()))
    assert reserved[0] - reserved[1] == 4 * num_staying * trainer.model.num_parameters()


def test_a_trainers_moments_lie_together(build: Build) -> None:
    """As they are made, and as they are loaded."""
    trainer = build(offload="moments")
    assert trainer.optimizer._host_memory is trainer._weights.host_memory is not None


def test_of_a_step_that_failed_nothing_reaches_what_is_loaded(
    build: Build, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = build(offload="moments")
    trainer.step(make_batch())
    trainer.save(tmp_path)
    log: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(trainer.optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.step(replace(make_batch(), step=2, version=1))
    monkeypatch.setattr(trainer.optimizer, "settle", lambda: log.append("settled"))
    monkeypatch.setattr(trainer._weights.host_memory, "forget", lambda: log.append("forgot"))
    trainer.load(tmp_path)
    assert log == ["settled", "forgot"]
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_moments_leave_behind_the_weights(
    build: Build, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose digest would come to the host behind one of their pieces."""
    log: list[str] = []
    trainer = build(offload="moments")
    monkeypatch.setattr(trainer.optimizer, "send_back", lambda: log.append("sent back"))
    send = trainer._sender.send
    monkeypatch.setattr(
        trainer._sender, "send", lambda *given, **more: (log.append("published"), send(*given, **more))[1]
    )
    trainer.step(make_batch())
    log.clear()
    trainer.publish(1)
    assert log == ["published", "sent back"]


def test_a_checkpoint_waits_for_moments_on_their_way(
    build: Build, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log: list[str] = []
    trainer = build(offload="moments")
    trainer.step(make_batch())
    monkeypatch.setattr(trainer.optimizer, "settle", lambda: log.append("settled"))
    monkeypatch.setattr(torch_trainer, "save_state", lambda *_, **__: log.append("saved"))
    trainer.save(tmp_path)
    assert log == ["settled", "saved"]
