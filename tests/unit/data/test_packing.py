from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.packing import PackedRow, pack
from headrace.types import NO_KV, Sample


def sample(index: int, num_tokens: int, *, temperature: float = 1.0, ref: bool = False) -> Sample:
    rng = np.random.default_rng(index)
    loss_mask = np.arange(num_tokens) >= num_tokens // 2
    return Sample(
        group=index,
        attempt=0,
        token_ids=rng.integers(0, 100, num_tokens).astype(np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=rng.normal(size=num_tokens).astype(np.float32),
        versions=np.where(loss_mask, index, -1).astype(np.int32),
        advantages=rng.normal(size=num_tokens).astype(np.float32),
        temperature=temperature,
        kv_versions=NO_KV,
        ref_logprobs=rng.normal(size=num_tokens).astype(np.float32) if ref else None,
    )


def check_row(row: PackedRow, samples: list[Sample]) -> None:
    for b, index in enumerate(row.sample_index):
        span = slice(int(row.cu_seqlens[b]), int(row.cu_seqlens[b + 1]))
        original = samples[index]
        assert np.array_equal(row.token_ids[span], original.token_ids)
        assert np.array_equal(row.position_ids[span], np.arange(original.num_tokens))
        assert np.array_equal(row.behavior_logprobs[span], original.behavior_logprobs)
        assert np.array_equal(row.versions[span], original.versions)
        assert np.array_equal(row.advantages[span], original.advantages)
        assert (row.sequence[span] == b).all()
        assert (row.temperatures[span] == np.float32(original.temperature)).all()
        assert np.array_equal(row.loss_mask[span][1:], original.loss_mask[1:])
        assert not row.loss_mask[span][0]


@given(lengths=st.lists(st.integers(1, 40), max_size=30), row_tokens=st.integers(1, 64))
def test_every_sample_lies_whole_in_exactly_one_row(lengths: list[int], row_tokens: int) -> None:
    samples = [sample(i, n, temperature=0.5 + i) for i, n in enumerate(lengths)]
    rows = pack(samples, row_tokens=row_tokens)
    assert sorted(int(i) for row in rows for i in row.sample_index) == list(range(len(samples)))
    for row in rows:
        check_row(row, samples)
        assert row.num_tokens <= row_tokens or row.num_sequences == 1
        assert list(row.sample_index) == sorted(row.sample_index)
    firsts = [int(row.sample_index[0]) for row in rows]
    assert firsts == sorted(firsts)


def test_rows_are_balanced_by_cost_not_filled_in_order() -> None:
    lengths = [60, 60, 5, 5, 5, 5, 5, 5]
    rows = pack([sample(i, n) for i, n in enumerate(lengths)], row_tokens=80, balance_tokens=32)
    assert sorted(row.num_tokens for row in rows) == [75, 75]


def test_attention_cost_keeps_long_sequences_apart_from_company() -> None:
    """By tokens alone 40 + 10 against 4 x 12 is even; a row with one long sequence costs far more."""
    rows = pack(
        [sample(i, n) for i, n in enumerate([40, 12, 12, 12, 12, 10])], row_tokens=60, balance_tokens=8
    )
    assert [row.num_tokens for row in rows] == [40, 58]


def test_a_sample_longer_than_a_row_has_one_of_its_own() -> None:
    rows = pack([sample(0, 3), sample(1, 50), sample(2, 4)], row_tokens=10)
    assert [[int(i) for i in row.sample_index] for row in rows] == [[0, 2], [1]]


def test_reference_logprobs_are_carried_only_when_complete() -> None:
    samples = [sample(0, 4, ref=True), sample(1, 5, ref=True)]
    (row,) = pack(samples, row_tokens=100)
    assert row.ref_logprobs is not None
    assert np.array_equal(row.ref_logprobs[4:], samples[1].ref_logprobs)
    (row,) = pack([samples[0], sample(1, 5)], row_tokens=100)
    assert row.ref_logprobs is None


def test_the_last_token_of_each_sequence_is_not_computed() -> None:
    """Nothing is predicted from it. A prefix is followed by others, and one token alone is left to its row."""
    (row,) = pack([sample(i, n) for i, n in enumerate([4, 1, 3])], row_tokens=100)
    assert row.computed.tolist() == [True, True, True, False, True, True, True, False]
    samples = [attempt(0, number, 6, sampled) for number, sampled in enumerate([3, 1])]
    (row,) = pack(samples, row_tokens=100, share_prefixes=True)
    assert np.flatnonzero(~row.computed).tolist() == [5 + 3, 5 + 4 + 1]
    assert row.computed[np.flatnonzero(row.loss_mask) - 1].all()


def test_impossible_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="row_tokens"):
        pack([], row_tokens=0)


def attempt(group: int, number: int, prompt: int, sampled: int) -> Sample:
    base = sample(1000 * group + number, prompt + sampled)
    token_ids = np.concatenate([np.arange(prompt) + 7 * group, base.token_ids[prompt:]]).astype(np.int32)
    loss_mask = np.arange(prompt + sampled) >= prompt
    return replace(base, group=group, attempt=number, token_ids=token_ids, loss_mask=loss_mask)


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(1, 12), min_size=1, max_size=5)), max_size=6
    ),
    row_tokens=st.integers(1, 80),
)
def test_shared_prefixes_change_where_tokens_lie_and_nothing_else(
    groups: list[tuple[int, list[int]]], row_tokens: int
) -> None:
    samples = [
        attempt(group, number, prompt, length)
        for group, (prompt, lengths) in enumerate(groups)
        for number, length in enumerate(lengths)
    ]
    rows = pack(samples, row_tokens=row_tokens, share_prefixes=True)
    assert sorted(int(i) for row in rows for i in row.sample_index) == list(range(len(samples)))
    for row in rows:
        num_prefixes = len(row.parents) - row.num_sequences
        assert row.num_tokens <= row_tokens or row.num_sequences == 1
        assert (row.parents[:num_prefixes] == -1).all()
        assert list(row.parents[num_prefixes:]) == sorted(row.parents[num_prefixes:], key=lambda p: p % 99)
        for place, index in enumerate(row.sample_index):
            tokens = sequence_tokens(row, num_prefixes + place)
            original = samples[index]
            assert np.array_equal(row.token_ids[tokens], original.token_ids)
            assert np.array_equal(row.position_ids[tokens], np.arange(original.num_tokens))
            assert np.array_equal(row.loss_mask[tokens][1:], original.loss_mask[1:])
            assert (row.sequence[tokens][row.loss_mask[tokens]] == place).all()
            own = tokens[row.loss_mask[tokens]] - 1
            assert (own >= row.cu_seqlens[num_prefixes + place]).all()


def sequence_tokens(row: PackedRow, segment: int) -> np.ndarray:
    path = [segment] if row.parents[segment] < 0 else [int(row.parents[segment]), segment]
    return np.concatenate([np.arange(row.cu_seqlens[s], row.cu_seqlens[s + 1]) for s in path])


def test_a_group_too_large_for_a_row_is_split_and_repeats_its_prompt() -> None:
    samples = [attempt(0, number, 11, 10) for number in range(4)]
    rows = pack(samples, row_tokens=35, share_prefixes=True)
    assert [row.num_tokens for row in rows] == [32, 32]
    assert [list(row.parents) for row in rows] == [[-1, 0, 0], [-1, 0, 0]]


def test_prefixes_that_save_next_to_nothing_are_not_shared() -> None:
    samples = [attempt(0, number, 3, 97) for number in range(4)]
    (row,) = pack(samples, row_tokens=1000, share_prefixes=True)
    assert row.num_tokens == 400 and (row.parents == -1).all()
    different = [replace(attempt(number, 0, 40, 5), group=0) for number in range(4)]
    (row,) = pack(different, row_tokens=1000, share_prefixes=True)
    assert row.num_tokens == 180


def test_groups_are_divided_rather_than_rows_left_half_empty() -> None:
    samples = [attempt(group, number, 25, 50) for group in range(6) for number in range(8)]
    # A whole group takes 432 tokens: six rows of 800 would hold one each, and four can hold them all.
    rows = pack(samples, row_tokens=800, share_prefixes=True)
    assert len(rows) == 4 and sum(row.num_tokens for row in rows) == 6 * 432 + 2 * 24


def test_groups_stay_whole_where_repeating_prompts_costs_more_than_a_few_rows() -> None:
    samples = [attempt(group, number, 601, 50) for group in range(8) for number in range(8)]
    # A whole group takes 1008 tokens. Four rows of 2500 could hold them all, if four groups' prompts came twice.
    rows = pack(samples, row_tokens=2500, share_prefixes=True)
    assert [row.num_tokens for row in rows] == [2 * 1008] * 4
    rows = pack(samples, row_tokens=1500, share_prefixes=True)
    assert [row.num_tokens for row in rows] == [1008] * 8
