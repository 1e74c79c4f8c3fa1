"""An adapter trained over several processes is the adapter trained in one: same curve, same bytes, same files."""

from __future__ import annotations

from pathlib import Path

from rank_tools import make_batch, make_model, ranked, single, within
from test_ranks import STEPS, assert_same_curve, assert_shared, counters, curve

from headrace.types import StepResult

LORA = {"lora.rank": 4, "trainer.learning_rate": 1e-2}


def test_two_ranks_train_an_adapter_as_one_process_does(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    alone = single(model, tmp_path / "segments", **LORA)
    expected = curve(alone, range(1, STEPS + 1))

    async def train() -> tuple[list[StepResult], list[dict[str, float]]]:
        async with ranked(model, tmp_path / "logs", ranks=2, **LORA) as cluster:
            found = [await cluster.trainer.step(make_batch(step)) for step in range(1, STEPS + 1)]
            return found, await counters(cluster)

    found, counted = within(60, train)
    assert_same_curve(found, expected)
    assert_shared(counted, "num_weights", alone.num_weights)
