"""Groups whose kept sets cannot be trained on are dropped with a counted reason; nothing else stops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from harness import MemorySink, make_pipeline, make_plan

from headrace.engines.scripted import ScriptedEngine
from headrace.errors import TaskError
from headrace.plan import virtual_clock
from headrace.runtime.drops import BARREN_STEPS
from headrace.types import MAX_KEPT_TOKENS, Completion, Request, Sampling, SamplingMask, Trajectory


class MaskingEngine(ScriptedEngine):
    """Answers with kept sets; those of some groups are wrong in the way it is told."""

    def __init__(self, wrong: dict[int, str]) -> None:
        super().__init__()
        self._wrong = wrong

    async def generate(self, request: Request, on_progress=None) -> Completion:
        # Its parent would report progress without any sets.
        completion = await super().generate(request)
        group, attempt, _ = map(int, request.id.split("/"))
        kind = self._wrong.get(group, "") if attempt == 1 else ""
        rows = [np.array([token, 1000 + token]) for token in completion.token_ids]
        if kind == "wide":
            rows[0] = np.append(rows[0], 5000 + np.arange(MAX_KEPT_TOKENS - 1))
        if kind == "without":
            rows[0] = rows[0] + 1
        if kind == "beyond":
            rows[0] = np.append(rows[0], 90_000)
        if kind == "stranger":
            completion.token_ids[0] = 90_000
        offsets = np.cumsum([0, *map(len, rows)])
        ids = np.concatenate([np.zeros(0), *rows]).astype(np.int32)
        mask = SamplingMask(token_ids=ids, offsets=offsets)
        return replace(completion, sampling_mask=None if kind in ("none", "stranger") else mask)


class TopP:
    """One turn with a cut distribution."""

    async def run(self, task, policy):
        prompt = np.array([int(task.id)], dtype=np.int32)
        turn = await policy.sample(prompt, Sampling(max_tokens=32, top_p=0.9))
        return (Trajectory(turns=(turn,), text=""),)


def test_wide_and_wrong_masks_end_their_groups_only(tmp_path):
    async def main():
        engine = MaskingEngine({1: "wide", 2: "beyond", 4: "without", 5: "wide"})
        return await make_pipeline(tmp_path, plan, engines=[engine], sink=sink).run()

    plan, sink = make_plan(vocab_size=50_000), MemorySink()
    state = virtual_clock.run(main())
    drops = {d["group"]: (d["reason"], d["detail"]) for d in sink.of("drop")}
    assert {group: reason for group, (reason, _) in drops.items()} == {
        1: "wide-mask", 2: "failed", 4: "failed", 5: "wide-mask"
    }  # fmt: skip
    assert "attempt 1/1, turn 0: token 0 was drawn among 8193 ids" in drops[1][1]
    assert "outside the vocabulary of 50000" in drops[2][1]
    assert "rollout.top_k" in drops[1][1] and "does not hold the sampled token" in drops[4][1]
    counts = state.ledger.attempts()
    assert counts["dropped:wide-mask"] == 2 * plan.group_size
    assert counts["trained"] == plan.total_groups * plan.group_size


def test_tokens_the_model_does_not_have_and_sets_that_were_not_recorded_end_their_groups_only(tmp_path):
    async def main():
        engine = MaskingEngine({1: "none", 3: "stranger"})
        pipeline = make_pipeline(tmp_path, plan, engines=[engine], sink=sink, environment=TopP())
        return await pipeline.run()

    plan, sink = make_plan(vocab_size=50_000), MemorySink()
    state = virtual_clock.run(main())
    drops = {d["group"]: (d["reason"], d["detail"]) for d in sink.of("drop")}
    assert {group: reason for group, (reason, _) in drops.items()} == {1: "failed", 3: "failed"}
    assert "attempt 1/1, turn 0: engine-0 recorded no sampling mask" in drops[1][1]
    assert "outside the vocabulary of 50000; give engine and trainer the same model" in drops[3][1]
    counts = state.ledger.attempts()
    assert counts["dropped:failed"] == 2 * plan.group_size
    assert counts["trained"] == plan.total_groups * plan.group_size


def test_a_run_in_which_every_set_is_too_wide_says_so(tmp_path):
    async def main():
        engine = MaskingEngine(dict.fromkeys(range(1000), "wide"))
        await make_pipeline(tmp_path, make_plan(), engines=[engine]).run()

    with pytest.raises(TaskError, match=rf"{BARREN_STEPS * 2} groups.*rollout\.top_k"):
        virtual_clock.run(main())
