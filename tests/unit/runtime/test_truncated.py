"""Completions cut off at their length: carried to the trainer, and penalised where that is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import MemorySink, OneTurn, make_pipeline, make_plan

from headrace.engines.scripted import ScriptedEngine
from headrace.plan import virtual_clock
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import Request, Sample, StepResult, Task, TrainBatch, Trajectory


class Recording(ScriptedTrainer):
    """Keeps what it is given, and warns at its second step."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Sample] = []

    async def step(self, batch: TrainBatch) -> StepResult:
        self.samples += batch.samples
        result = await super().step(batch)
        return replace(result, warning="step 2: look here" if batch.step == 2 else None)


def script(request: Request) -> np.ndarray:
    """Attempt 0 fills its length, the others end before; all begin with an even token."""
    return np.zeros(4 if request.id.split("/")[1] == "0" else 2, dtype=np.int32)


def run(tmp_path: Path, environment: OneTurn | None = None, **changes: Any) -> tuple[Recording, MemorySink]:
    async def main() -> tuple[Recording, MemorySink]:
        trainer, sink = Recording(), MemorySink()
        pipeline = make_pipeline(
            tmp_path,
            make_plan(advantage="dr-grpo", steps=3, **changes),
            engines=[ScriptedEngine(script=script)],
            environment=environment or OneTurn(max_tokens=4),
            trainer=trainer,
            sink=sink,
        )
        await pipeline.run()
        return trainer, sink

    return virtual_clock.run(main())


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_cut_off_attempts_are_marked_and_lose_the_penalty(tmp_path: Path, penalty: float) -> None:
    trainer, _ = run(tmp_path, truncated_penalty=penalty)
    assert len(trainer.samples) == 3 * 2 * 3
    for sample in trainer.samples:
        is_cut = sample.attempt == 0
        assert sample.finish_reason == ("length" if is_cut else "stop")
        # Every reward is 1, so the penalty alone makes a difference: returns 1 - p, 1, 1.
        expected = -penalty * 2 / 3 if is_cut else penalty / 3
        assert sample.advantages[sample.loss_mask].tolist() == pytest.approx(
            [expected] * sample.num_loss_tokens
        )


def test_a_trainers_warning_reaches_people_at_once(tmp_path: Path) -> None:
    _, sink = run(tmp_path)
    assert [fields["text"] for fields in sink.of("warning")] == ["step 2: look here"]


class TwoTurns(OneTurn):
    """Each completion has all of the length to itself."""

    async def run(self, task: Task, policy: Any) -> tuple[Trajectory, ...]:
        first = await super().run(task, policy)
        second = await super().run(task, policy)
        return (Trajectory(turns=first[0].turns + second[0].turns, text=""),)


def test_an_overlong_completion_costs_reward_and_many_turns_do_not(tmp_path: Path) -> None:
    found = {}
    for environment in (OneTurn(max_tokens=4), TwoTurns(max_tokens=4)):
        trainer, _ = run(
            tmp_path / type(environment).__name__, environment=environment, max_tokens=4, overlong_buffer_tokens=2,
            overlong_factor=1.0,
        )  # fmt: skip
        # Of three attempts one fills its length and loses 1; the others end where the penalty begins.
        found[type(environment)] = {s.attempt: float(s.advantages[s.loss_mask][0]) for s in trainer.samples}
    assert found[OneTurn] == found[TwoTurns] == pytest.approx({0: -2 / 3, 1: 1 / 3, 2: 1 / 3})
