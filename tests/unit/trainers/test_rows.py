"""Rows come to the device one by one, and are the same whoever asks for them when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.models.uploads import to_device
from headrace.trainers import rows as rows_module
from headrace.trainers.device_rows import LazyRows, TrainRow, known_starts, most_tokens
from headrace.trainers.ranks import ALONE, Ranks
from headrace.trainers.rows import train_rows
from headrace.types import NO_KV, Sample


def sample(group: int, num_prompt: int, num_sampled: int) -> Sample:
    num_tokens = num_prompt + num_sampled
    rng = np.random.default_rng(group)
    mask = np.arange(num_tokens) >= num_prompt
    return Sample(
        group=group,
        attempt=0,
        token_ids=rng.integers(0, 50, num_tokens).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -1.5, 0.0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        advantages=np.where(mask, float(group), 0.0).astype(np.float32),
        temperature=1.0,
        kv_versions=NO_KV,
    )


def make_rows(samples: list[Sample], ranks: Ranks = ALONE) -> LazyRows:
    return train_rows(
        samples,
        version=4,
        aggregation="token-mean",
        max_tokens=None,
        row_tokens=12,
        share_prefixes=False,
        device=torch.device("cpu"),
        ranks=ranks,
    )


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """Tokens of each row that was brought to the device, in order."""
    brought, build = [], rows_module.row_tensors

    def counted(row, **kwargs):
        brought.append(row.num_tokens)
        return build(row, **kwargs)

    monkeypatch.setattr(rows_module, "row_tensors", counted)
    return brought


def test_a_row_is_made_when_it_is_asked_for_and_once(made):
    rows = make_rows([sample(i, 3, 6) for i in range(3)])
    assert len(rows) == 3 and made == []
    first = rows[0]
    assert made == [9]
    assert [row.tensors.token_ids_T.numel() for row in rows] == [8, 8, 8]
    assert rows[0] is first and rows[-1] is rows[2] and len(made) == 3
    assert [row is rows[i + 1] for i, row in enumerate(rows[1:])] == [True, True]
    with pytest.raises(IndexError):
        rows[3]


def test_the_longest_row_is_known_before_any_is_made(made):
    rows = make_rows([sample(0, 2, 3), sample(1, 1, 10), sample(2, 4, 1)])
    longest = most_tokens(rows)
    assert made == []
    assert longest == most_tokens(list(rows)) == 10


def test_rows_that_are_not_made_yet_are_not_made_to_learn_that_nothing_is_known_of_them(made):
    rows = make_rows([sample(0, 2, 3), sample(1, 1, 10)])
    assert known_starts(rows) == [] and made == []
    prox_N = torch.zeros(3)
    first = replace(rows[0], inputs=replace(rows[0].inputs, prox_logprobs_N=prox_N))
    ((start_N, inputs),) = known_starts([first, rows[1]])
    assert start_N is prox_N and inputs is first.inputs


def test_no_rows_have_no_tokens():
    assert most_tokens(make_rows([])) == most_tokens([]) == 0


class BesideABusyOne(Ranks):
    """Another rank has one row more."""

    def largest(self, *values: float) -> list[float]:
        return [value + 1 for value in values]


def test_a_row_that_only_keeps_step_is_as_compiled_layers_know_them():
    """Compiled code serves any number of tokens but one, which is compiled for by itself."""
    *_, filler = make_rows([sample(0, 2, 3)], BesideABusyOne())
    assert filler.is_filler
    assert filler.tensors.token_ids_T.numel() == 2
    assert most_tokens(make_rows([], BesideABusyOne())) == 2


def test_lazy_rows_weigh_what_the_whole_step_says():
    rows = make_rows([sample(0, 3, 6), sample(1, 2, 4), sample(2, 0, 1)])
    weights_N = torch.cat([row.inputs.weights_N for row in rows])
    assert weights_N.sum().item() == pytest.approx(1.0)
    assert torch.equal(rows[0].inputs.lags_N, torch.ones(6, dtype=torch.int64))


def test_an_array_of_any_layout_reaches_the_device_as_it_is():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (array, array[:, ::2], array.T, array[::-1, 0]):
        assert np.array_equal(to_device(view, "cpu").numpy(), view)


def test_a_row_that_cannot_be_made_does_not_end_the_rows():
    def fails() -> TrainRow:
        raise IndexError("a place outside the row")

    with pytest.raises(IndexError, match="a place outside"):
        list(LazyRows([fails], most_tokens=1))
