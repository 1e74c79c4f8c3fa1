from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.driver import TrainerDriver
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import TrainBatch


@pytest.fixture
def core(make_model: Callable[..., PreTrainedModel], sender: Any) -> TorchTrainer:
    return TorchTrainer(
        make_model(), sender=sender, ledger=TimeLedger(TRAINER_ACTIVITIES), learning_rate=1e-3
    )


@pytest.mark.parametrize("threaded", [False, True])
def test_the_whole_protocol(
    threaded: bool, core: TorchTrainer, sender: Any, make_batch: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    async def use() -> None:
        driver = TrainerDriver(core, threaded=threaded)
        result = await driver.step(make_batch(1))
        assert result.version == 1
        assert (await driver.publish(1)).version == 1
        await driver.retire(1)
        await driver.save(tmp_path)
        await driver.step(make_batch(2))
        assert await driver.load(tmp_path) == 1
        status = await driver.status()
        assert (status.role, status.version, status.counters["num_steps"]) == ("trainer", 1, 1.0)
        assert status.progress > 0 and status.seconds["forward-backward"] > 0
        await driver.close()

    asyncio.run(asyncio.wait_for(use(), timeout=60))
    assert sender.closed and not sender.sent


def test_both_ways_of_running_give_the_same_bits(
    make_model: Callable[..., PreTrainedModel], sender: Any, make_batch: Callable[..., TrainBatch]
) -> None:
    async def train(threaded: bool) -> dict[str, torch.Tensor]:
        core = TorchTrainer(
            make_model(), sender=sender, ledger=TimeLedger(TRAINER_ACTIVITIES), learning_rate=1e-3
        )
        driver = TrainerDriver(core, threaded=threaded)
        for step in (1, 2):
            await driver.step(make_batch(step))
        await driver.close()
        return dict(core.model.state_dict())

    inline, threaded = asyncio.run(train(False)), asyncio.run(train(True))
    assert all(torch.equal(inline[name], threaded[name]) for name in inline)


def test_status_answers_during_a_step(core: TorchTrainer, make_batch: Callable[..., TrainBatch]) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        inside.set()
        assert go_on.wait(timeout=30)

    core.model.get_decoder().register_forward_pre_hook(hold)

    async def use() -> None:
        driver = TrainerDriver(core, threaded=True)
        step = asyncio.ensure_future(driver.step(make_batch(1)))
        await asyncio.to_thread(inside.wait, 30)
        assert (await driver.status()).version == 0
        assert core.ledger.current == "forward-backward"
        go_on.set()
        assert (await step).version == 1
        await driver.close()

    asyncio.run(asyncio.wait_for(use(), timeout=60))
