from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import CheckpointError, InvariantError, RoleError
from headrace.launch.ranked_trainer import RankedTrainer
from headrace.types import StepResult, TrainBatch

Answer = Callable[[str, Any], Awaitable[Any]]


class Rank:
    """A rank's process as the trainer sees it."""

    def __init__(self, name: str, answer: Answer) -> None:
        self.spec = SimpleNamespace(name=name)
        self.caller = self
        self.failure: asyncio.Future[RoleError] = asyncio.get_running_loop().create_future()
        self.killed = asyncio.Event()
        self.calls: list[tuple[str, Any]] = []
        self._answer = answer

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        self.calls.append((method, *args))
        answer = asyncio.ensure_future(self._answer(method, *args))
        killed = asyncio.ensure_future(self.killed.wait())
        await asyncio.wait({answer, killed}, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if not answer.done():
            answer.cancel()
            raise RoleError(f"{self.spec.name} was closed")
        return answer.result()

    async def kill(self) -> None:
        self.killed.set()


async def forever(*_: Any) -> Any:
    await asyncio.get_running_loop().create_future()


def failing(error: Exception) -> Answer:
    async def answer(*_: Any) -> Any:
        raise error

    return answer


def returning(value: Any) -> Answer:
    async def answer(*_: Any) -> Any:
        return value

    return answer


def trainer(ranks: list[Rank]) -> RankedTrainer:
    return RankedTrainer(ranks, num_minibatches=1, grace_s=0.01)  # type: ignore[arg-type]


BATCH = TrainBatch(step=1, version=0, samples=())
RESULT = StepResult(step=1, version=1, num_loss_tokens=3)


def test_every_rank_is_called_and_the_first_answers() -> None:
    async def use() -> None:
        ranks = [Rank("trainer-0", returning(RESULT)), Rank("trainer-1", returning(RESULT))]
        assert await trainer(ranks).step(BATCH) is RESULT
        assert [rank.calls for rank in ranks] == [[("step_share", [BATCH])]] * 2

    asyncio.run(use())


def test_only_the_first_rank_has_bytes_to_retire_and_announces() -> None:
    async def use() -> None:
        ranks = [Rank("trainer-0", returning("manifest")), Rank("trainer-1", returning(None))]
        assert await trainer(ranks).publish(3) == "manifest"
        await trainer(ranks).retire(3)
        assert [len(rank.calls) for rank in ranks] == [2, 1]

    asyncio.run(use())


def test_ranks_left_waiting_by_one_that_failed_are_ended() -> None:
    async def use() -> None:
        ranks = [
            Rank("trainer-0", forever),
            Rank("trainer-1", failing(RoleError("trainer-1: out of memory"))),
        ]
        with pytest.raises(RoleError, match="trainer-1: out of memory"):
            await trainer(ranks).step(BATCH)
        assert [rank.killed.is_set() for rank in ranks] == [True, False]

    asyncio.run(use())


def test_a_failure_that_all_share_leaves_them_alive() -> None:
    async def use() -> None:
        ranks = [Rank(f"trainer-{i}", failing(CheckpointError("no space"))) for i in range(2)]
        with pytest.raises(CheckpointError, match="no space"):
            await trainer(ranks).save(SimpleNamespace(absolute=lambda: "x"))  # type: ignore[arg-type]
        assert not any(rank.killed.is_set() for rank in ranks)

    asyncio.run(use())


def test_the_rank_that_died_is_the_one_that_is_named() -> None:
    async def use() -> None:
        ranks = [Rank("trainer-0", failing(RoleError("peer closed"))), Rank("trainer-1", forever)]
        ranks[1].failure.set_result(RoleError("trainer-1 died (killed by SIGKILL)"))
        with pytest.raises(RoleError, match="trainer-1 died"):
            await trainer(ranks).step(BATCH)

    asyncio.run(use())


def test_ranks_that_disagree_are_an_error() -> None:
    async def use() -> None:
        ranks = [Rank("trainer-0", returning(4)), Rank("trainer-1", returning(5))]
        with pytest.raises(InvariantError, match="differently"):
            await trainer(ranks).load(SimpleNamespace(absolute=lambda: "x"))  # type: ignore[arg-type]

    asyncio.run(use())
