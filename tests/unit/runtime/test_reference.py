"""The starting policy as an engine of its own: every sample carries its log-probabilities."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from harness import MemorySink, make_pipeline, make_plan

from headrace.data.samples import build_samples, sequences
from headrace.engines.scripted import ScriptedEngine
from headrace.errors import RewardError
from headrace.plan import virtual_clock
from headrace.runtime.reference import ReferencePolicy
from headrace.trainers.scripted import ScriptedTrainer
from headrace.types import NO_KV, Completion, Episode, EpisodeGroup, Sampling, Task, Trajectory, Turn


class Reference(ScriptedEngine):
    """Answers with the token ids as they are, over the temperature, and counts what it is asked."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        super().__init__("reference")
        self.num_asked = 0
        self._seconds = seconds

    async def score(self, token_ids, *, temperature=1.0):
        self.num_asked += len(token_ids)
        await asyncio.sleep(self._seconds)
        return [(ids / temperature).astype(np.float32) for ids in token_ids]

    async def apply(self, manifest):
        raise AssertionError("a reference keeps its weights")


class RecordingTrainer(ScriptedTrainer):
    """Keeps the batches it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = []

    async def step(self, batch):
        self.samples.extend(batch.samples)
        return await super().step(batch)


def one_turn(prompt: list[int], answer: list[int], temperature: float) -> Turn:
    completion = Completion(
        token_ids=np.array(answer, dtype=np.int32),
        logprobs=np.zeros(len(answer), dtype=np.float32),
        versions=np.zeros(len(answer), dtype=np.int32),
        finish_reason="stop",
        kv_versions=NO_KV,
    )
    return Turn(
        prompt_ids=np.array(prompt, dtype=np.int32),
        completion=completion,
        sampling=Sampling(max_tokens=8, temperature=temperature),
        seed=0,
        engine="engine-0",
    )


def some_episodes() -> tuple[Episode, ...]:
    """Out of order, with two temperatures, a second turn that continues the first, and one that does not."""
    chat = (one_turn([1, 2], [3], 1.0), one_turn([1, 2, 3, 4], [5, 6], 1.0), one_turn([9], [8], 1.0))
    return tuple(
        Episode(
            group=0, attempt=a, task=Task(id="0", prompt="p"), trajectories=(Trajectory(turns=t, text=""),)
        )
        for a, t in ((1, chat), (0, (one_turn([7], [6, 5], 0.5),)))
    )


def test_sequences_are_those_of_the_samples_in_their_order():
    episodes = some_episodes()
    group = EpisodeGroup(group=0, task=episodes[0].task, episodes=episodes, returns=(0.0, 1.0))
    samples, asked = build_samples(group, [0.0, 1.0]), sequences(episodes)
    assert [ids.tolist() for ids, _ in asked] == [sample.token_ids.tolist() for sample in samples]
    assert [temperature for _, temperature in asked] == [sample.temperature for sample in samples]


def test_answers_come_back_to_the_samples_they_belong_to():
    async def main():
        return await ReferencePolicy(Reference(), deadline_s=1.0).logprobs(0, episodes)

    episodes = some_episodes()
    answers = asyncio.run(main())
    group = EpisodeGroup(
        group=0, task=episodes[0].task, episodes=episodes, returns=(0.0, 1.0), ref_logprobs=answers
    )
    for sample in build_samples(group, [0.0, 1.0]):
        np.testing.assert_array_equal(sample.ref_logprobs, sample.token_ids / np.float32(sample.temperature))


@pytest.mark.parametrize("max_lag", [0, 2])
@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_every_sample_that_is_trained_has_been_scored_within_the_lag(tmp_path, max_lag, seconds):
    async def main():
        trainer, reference = RecordingTrainer(), Reference(seconds=seconds)
        plan = make_plan(max_lag=max_lag)
        await make_pipeline(tmp_path, plan, trainer=trainer, reference=reference).run()
        return trainer, reference

    trainer, reference = virtual_clock.run(main())
    assert len(trainer.samples) == 6 * 2 * 3 == reference.num_asked
    assert set(trainer.counts.values()) == {1}
    assert max(trainer.lags) <= max_lag
    for sample in trainer.samples:
        np.testing.assert_array_equal(sample.ref_logprobs, sample.token_ids.astype(np.float32))


def test_what_the_journal_holds_is_not_asked_for_again(tmp_path):
    """Killed while its first groups wait for a slow trainer: the successor trains them as they were scored."""

    async def first_life():
        trainer = ScriptedTrainer(token_s=1e3)
        pipeline = make_pipeline(tmp_path, make_plan(stall_s=1e9), trainer=trainer, reference=Reference())
        task = asyncio.ensure_future(pipeline.run())
        await asyncio.wait({task}, timeout=100.0)
        pipeline._journal.flush()
        pipeline._journal.flush = lambda: None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def second_life():
        trainer, reference = RecordingTrainer(), Reference()
        await make_pipeline(tmp_path, make_plan(), trainer=trainer, reference=reference).run()
        return trainer, reference

    virtual_clock.run(first_life())
    trainer, reference = virtual_clock.run(second_life())
    assert len(trainer.samples) == 6 * 2 * 3
    assert reference.num_asked == 6 * 2 * 3 - 4 * 3  # both batches that lag 1 allows were scored before
    assert all(sample.ref_logprobs is not None for sample in trainer.samples)


def test_a_reference_that_never_answers_ends_the_run_when_the_budget_is_spent_and_is_named(tmp_path):
    async def main():
        plan = make_plan(stall_s=5.0)
        await make_pipeline(tmp_path, plan, reference=Reference(seconds=1e6), sink=MemorySink()).run()

    said = r"4 of \d+ groups failed, over reward.error_budget.* 5 s for reference to score group \d; .*run\.stall_s"
    with pytest.raises(RewardError, match=said):
        virtual_clock.run(main())


def test_a_late_answer_costs_its_group_and_nothing_else(tmp_path):
    class SlowOnce(Reference):
        async def score(self, token_ids, **options):
            if self.num_asked == 4:
                self.num_asked += 1
                await asyncio.sleep(1e6)
            return await super().score(token_ids, **options)

    async def main():
        trainer, sink = RecordingTrainer(), MemorySink()
        reference = SlowOnce()
        await make_pipeline(
            tmp_path, make_plan(stall_s=5.0), trainer=trainer, reference=reference, sink=sink
        ).run()
        return trainer, sink

    trainer, sink = virtual_clock.run(main())
    assert len(trainer.samples) == 6 * 2 * 3
    (dropped,) = [fields for fields in sink.of("drop") if fields["reason"] == "failed"]
    assert "waited 5 s for reference" in dropped["detail"]
