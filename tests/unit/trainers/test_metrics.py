"""The figures of a step, made of records alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.trainers.metrics import RowRecord, behavior_metrics, starts, step_metrics
from headrace.trainers.objective import LossInputs, Objective

LENGTHS = (3, 1, 4, 2, 5, 1, 2, 6)
OBJECTIVE = Objective(corrections=("tis",))


def records(num_rows: int) -> list[RowRecord]:
    """The same eight sequences, dealt out to so many rows in order."""
    random = torch.Generator().manual_seed(0)
    values = [
        [torch.randn(length, generator=random) for _ in range(4)]
        + [torch.randint(0, 4, (length,), generator=random)]
        for length in LENGTHS
    ]
    each = len(LENGTHS) // num_rows
    found = []
    for first in range(0, len(LENGTHS), each):
        behavior, policy, advantages, entropy, lags = (
            torch.cat(column) for column in zip(*values[first : first + each], strict=True)
        )
        lengths = torch.tensor(LENGTHS[first : first + each])
        inputs = LossInputs(
            behavior_logprobs_N=behavior, advantages_N=advantages, lags_N=lags,
            weights_N=torch.full_like(policy, 1 / sum(LENGTHS)), num_sequences=each + 1,
            # The last sequence of a row has no loss tokens.
            sequence_N=torch.arange(each).repeat_interleave(lengths), prox_logprobs_N=None, ref_logprobs_N=None,
        )  # fmt: skip
        found.append(
            RowRecord(
                inputs=inputs, outcome=OBJECTIVE(policy, inputs), policy_logprobs_N=policy, entropy_N=entropy,
                before_update=True,
            )
        )  # fmt: skip
    return found


def figures(rows: list[RowRecord]) -> dict[str, float]:
    return step_metrics(rows, OBJECTIVE, behavior=behavior_metrics(starts(rows)))


@pytest.mark.parametrize("num_rows", [2, 4, 8])
def test_figures_do_not_depend_on_how_sequences_are_dealt_out_to_rows(num_rows: int) -> None:
    whole, cut = figures(records(1)), figures(records(num_rows))
    assert list(whole) == list(cut)
    assert cut == pytest.approx(whole, rel=1e-6)


def test_figures_are_those_of_a_plain_loop_over_sequences() -> None:
    (record,) = records(1)
    found, inputs = figures([record]), record.inputs
    gaps = (record.policy_logprobs_N - inputs.behavior_logprobs_N).double()
    of_sequences = [
        (gap, lag) for gap, lag in zip(gaps.split(LENGTHS), inputs.lags_N.split(LENGTHS), strict=True)
    ]
    weights = [math.exp(float(gap.sum())) for gap, _ in of_sequences]
    spans = [int(lag.max() - lag.min()) for _, lag in of_sequences]
    fresh = gaps[inputs.lags_N == 0].abs()
    assert found["effective_samples"] == pytest.approx(
        sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))
    )
    assert found["behavior_kl"] == pytest.approx(float((gaps.exp() - 1 - gaps).mean()))
    assert (found["version_span_mean"], found["version_span_max"]) == (sum(spans) / len(spans), max(spans))
    assert found["mismatch_mean"] == pytest.approx(float(fresh.mean()))
    assert found["fresh_fraction"] == pytest.approx(len(fresh) / len(gaps))


def test_a_step_of_a_single_token_has_figures() -> None:
    one = torch.zeros(1)
    inputs = LossInputs(
        behavior_logprobs_N=one - 1, advantages_N=one, lags_N=torch.zeros(1, dtype=torch.int64),
        weights_N=one + 1, num_sequences=2, sequence_N=torch.ones(1, dtype=torch.int64), prox_logprobs_N=None,
        ref_logprobs_N=None,
    )  # fmt: skip
    found = behavior_metrics([(one, inputs)])
    assert found["effective_samples"] == found["fresh_fraction"] == 1.0
    assert found["mismatch_mean"] == found["mismatch_max"] == 1.0


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_a_row_more_costs_few_launches_and_no_wait() -> None:
    """A GPU has nothing else to do meanwhile."""
    two, eight = records(2), records(8)
    with Launches() as of_two:
        figures(two)
    with Launches() as of_eight:
        figures(eight)
    more = of_eight.counts - of_two.counts
    assert sum(more.values()) <= 4 * 6, more
    waits = ("local_scalar_dense", "nonzero", "index.Tensor", "bincount")
    assert not [name for name in more if any(wait in name for wait in waits)]
