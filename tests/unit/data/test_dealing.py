from __future__ import annotations

import numpy as np
import pytest

from headrace.data.dealing import UNEVENNESS, deal, minibatches
from headrace.types import NO_KV, Sample, TrainBatch


def sample(group: int, attempt: int, num_tokens: int) -> Sample:
    return Sample(
        group=group,
        attempt=attempt,
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        loss_mask=np.ones(num_tokens, dtype=bool),
        behavior_logprobs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.zeros(num_tokens, dtype=np.int32),
        advantages=np.zeros(num_tokens, dtype=np.float32),
        temperature=1.0,
        kv_versions=NO_KV,
    )


def batch(lengths: list[list[int]]) -> TrainBatch:
    samples = tuple(sample(g, a, n) for g, group in enumerate(lengths) for a, n in enumerate(group))
    return TrainBatch(step=3, version=2, samples=samples)


def names(part: TrainBatch) -> list[tuple[int, int]]:
    return [(s.group, s.attempt) for s in part.samples]


def test_every_sample_is_dealt_once_and_in_order() -> None:
    whole = batch([[5, 9], [3, 3], [20, 1], [7, 8], [2, 2]])
    shares = deal(whole, num_ranks=3, num_minibatches=2)
    parts = minibatches(whole, 2)
    assert [len(share) for share in shares] == [2, 2, 2]
    for index, part in enumerate(parts):
        dealt = [name for share in shares for name in names(share[index])]
        assert sorted(dealt) == names(part)
        assert all(names(share[index]) == sorted(names(share[index])) for share in shares)
    assert {(p.step, p.version) for share in shares for p in share} == {(3, 2)}


def test_shares_are_close_in_cost() -> None:
    rng = np.random.default_rng(0)
    whole = batch([[int(n) for n in rng.integers(10, 500, 8)] for _ in range(8)])
    tokens = [sum(s.num_tokens for s in share[0].samples) for share in deal(whole, num_ranks=4)]
    assert max(tokens) <= UNEVENNESS * sum(tokens) / 4


def test_a_group_stays_on_one_rank_unless_that_is_uneven() -> None:
    even = deal(batch([[10, 10]] * 4), num_ranks=2)
    assert all(len({s.group for s in share[0].samples}) == 2 for share in even)
    uneven = deal(batch([[10, 10], [10, 10], [10, 10]]), num_ranks=2)
    assert [len(share[0].samples) for share in uneven] == [3, 3]


def test_fewer_samples_than_ranks_leave_empty_shares() -> None:
    shares = deal(batch([[4, 6]]), num_ranks=4)
    assert sorted(len(share[0].samples) for share in shares) == [0, 0, 1, 1]


@pytest.mark.parametrize(("count", "sizes"), [(1, [5]), (2, [3, 2]), (9, [1, 1, 1, 1, 1])])
def test_minibatches_are_nearly_equal(count: int, sizes: list[int]) -> None:
    assert [len(part.samples) for part in minibatches(batch([[1, 1, 1, 1, 1]]), count)] == sizes
