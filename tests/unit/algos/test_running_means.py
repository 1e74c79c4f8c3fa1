from __future__ import annotations

import numpy as np
import pytest

from headrace.algos.running_means import folded, over_means
from headrace.types import NO_KV, Sample


def sample(advantage: float) -> Sample:
    mask = np.array([False, True, True])
    return Sample(
        group=0,
        attempt=0,
        token_ids=np.zeros(3, np.int32),
        loss_mask=mask,
        behavior_logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        temperature=1.0,
        kv_versions=NO_KV,
    )


def test_a_mean_is_what_the_formula_makes_of_all_returns() -> None:
    returns, decay = [1.0, 0.0, 0.5, -2.0], 0.9
    # Unrolled: the newest return counts 1 - decay, each older one decay times as much as the next.
    expected = sum((1 - decay) * decay**age * value for age, value in enumerate(reversed(returns)))
    assert folded({}, [("a", value) for value in returns], decay=decay)["a"] == pytest.approx(expected)


def test_agents_are_apart_and_nothing_given_is_changed() -> None:
    before = {"a": 0.5}
    after = folded(before, [("a", 1.0), ("b", 3.0), ("a", 0.0)], decay=0.5)
    assert after == {"a": 0.375, "b": 1.5}
    assert before == {"a": 0.5}


def test_the_mean_is_taken_off_loss_tokens_alone() -> None:
    first, second = over_means([sample(1.0), sample(1.0)], ["a", "new"], {"a": 0.25})
    assert first.advantages.tolist() == [0.0, 0.75, 0.75]
    assert second.advantages.tolist() == [0.0, 1.0, 1.0]
