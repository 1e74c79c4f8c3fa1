"""Routes that cannot be: the group they belong to is dropped and named, and nothing else happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import MemorySink, make_pipeline, make_plan

from headrace.data.routing import RouterShape, check_routing
from headrace.engines.scripted import ScriptedEngine
from headrace.plan import virtual_clock
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import Completion, Request, Routing, Sample, StepResult, TrainBatch

SHAPE = RouterShape(num_layers=2, num_experts=8, top_k=2)


class RoutingEngine(ScriptedEngine):
    """Adds routes to what it samples, and spoils those of one group."""

    def __init__(self, fault: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._fault = fault

    async def generate(self, request: Request, on_progress: Any = None) -> Completion:
        def told(snapshot: Completion) -> None:
            on_progress(self._routed(request, snapshot))

        return self._routed(request, await super().generate(request, told))

    def _routed(self, request: Request, completion: Completion) -> Completion:
        num_tokens = len(request.prompt_ids) + completion.num_tokens
        recorded = np.arange(num_tokens) < num_tokens - 1
        experts = np.tile(np.array([3, 5], np.uint8), (num_tokens - 1, 2, 1))
        if request.id.startswith("2/1/") and experts.size:
            if self._fault == "range":
                experts[-1, 1, 0] = 8
            elif self._fault == "twice":
                experts[-1, 1] = 3
            elif self._fault == "layers":
                experts = experts[:, :1]
            elif self._fault == "rows":
                experts = experts[1:]
            elif self._fault == "last":
                recorded = ~recorded
                experts = experts[:1]
        return replace(completion, routing=Routing(experts=experts, recorded=recorded))


def run_with(tmp_path: Path, fault: str) -> tuple[Any, MemorySink]:
    sink = MemorySink()

    async def whole() -> Any:
        engines = [RoutingEngine(fault)]
        return await make_pipeline(tmp_path, make_plan(routers=SHAPE), engines=engines, sink=sink).run()

    return virtual_clock.run(whole()), sink


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("range", "names expert 8 of 8"),
        ("twice", "names an expert twice"),
        ("layers", "1 layers and the model has 2"),
        ("rows", "have experts"),
        ("last", "last token is marked"),
    ],
)
def test_a_bad_record_ends_its_group_alone(tmp_path: Path, fault: str, words: str) -> None:
    state, sink = run_with(tmp_path, fault)
    assert state.step == 6
    dropped = sink.of("drop")
    assert [event["group"] for event in dropped] == [2]
    assert words in dropped[0]["detail"] and "request 2/1/0 on engine-0" in dropped[0]["detail"]
    assert state.ledger.attempts()["dropped:failed"] == 3
    state.ledger.check()


class ListeningTrainer(ScriptedTrainer):
    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Sample] = []

    async def step(self, batch: TrainBatch) -> StepResult:
        self.samples += batch.samples
        return await super().step(batch)


@pytest.mark.parametrize("mode", ["never", "abort"])
def test_good_records_arrive_with_their_samples(tmp_path: Path, mode: Any) -> None:
    """Also those of attempts that were interrupted and resumed over several versions."""

    async def whole() -> ListeningTrainer:
        trainer, engines = ListeningTrainer(), [RoutingEngine("none", token_s=0.1)]
        plan = make_plan(routers=SHAPE, interrupt=mode, max_lag=2)
        await make_pipeline(tmp_path, plan, engines=engines, trainer=trainer).run()
        return trainer

    samples = virtual_clock.run(whole()).samples
    assert len(samples) == 36
    for sample in samples:
        assert sample.routing is not None
        check_routing(sample.routing, num_tokens=sample.num_tokens, **SHAPE._asdict())
        assert sample.routing.recorded.tolist() == [True] * (sample.num_tokens - 1) + [False]
