"""Losses, corrections and further parts put together, against plain Python; and what a step does with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.data.packing import PackedRow
from headrace.errors import TrainingError
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.objective import LossInputs, Objective
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import TrainBatch

RNG = np.random.default_rng(21)
SEQUENCE = RNG.permutation(np.repeat(np.arange(4), [2, 4, 6, 8]))
NUM_TOKENS = len(SEQUENCE)
BEHAVIOR = -RNG.uniform(0.2, 2.5, NUM_TOKENS)
PROX = BEHAVIOR + RNG.normal(0, 0.2, NUM_TOKENS)
POLICY = PROX + RNG.normal(0, 0.2, NUM_TOKENS)
ADVANTAGES = np.array([1.0, -1.5, 0.5, -0.7])[SEQUENCE]
LAGS = RNG.integers(0, 4, NUM_TOKENS)
WEIGHTS = RNG.uniform(0.01, 0.1, NUM_TOKENS)
MakeBatch = Callable[..., TrainBatch]


def inputs(**changes: Any) -> LossInputs:
    return replace(
        LossInputs(
            behavior_logprobs_N=torch.from_numpy(BEHAVIOR),
            advantages_N=torch.from_numpy(ADVANTAGES),
            lags_N=torch.from_numpy(LAGS),
            weights_N=torch.from_numpy(WEIGHTS),
            sequence_N=torch.from_numpy(SEQUENCE),
            num_sequences=4,
            prox_logprobs_N=torch.from_numpy(PROX),
            ref_logprobs_N=None,
        ),
        **changes,
    )


def ppo(ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)


def gap_of(i: int, left: np.ndarray, right: np.ndarray, kind: Callable[[list[float]], float]) -> float:
    return kind([float(left[j] - right[j]) for j in range(NUM_TOKENS) if SEQUENCE[j] == SEQUENCE[i]])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def tis_and_geo(i: int) -> float:
    rho = math.exp(PROX[i] - BEHAVIOR[i])
    keep = 0.95 <= math.exp(gap_of(i, PROX, BEHAVIOR, mean)) <= 1.05
    return keep * min(rho, 1.1) * ppo(math.exp(POLICY[i] - PROX[i]), ADVANTAGES[i])


def icepop_and_opsm(i: int) -> float:
    rho = math.exp(PROX[i] - BEHAVIOR[i])
    keep = (ADVANTAGES[i] >= 0 or gap_of(i, BEHAVIOR, POLICY, mean) <= 0.01) and 0.8 <= rho <= 1.25
    return -keep * rho * math.exp(POLICY[i] - PROX[i]) * ADVANTAGES[i] * POLICY[i]


def gspo_and_seq_tis(i: int) -> float:
    rho = math.exp(gap_of(i, PROX, BEHAVIOR, sum))
    ratio = math.exp(gap_of(i, POLICY, PROX, mean))
    clipped = min(max(ratio, 0.95), 1.05)
    return -min(rho, 0.9) * min(ratio * ADVANTAGES[i], clipped * ADVANTAGES[i])


def decoupled(i: int) -> float:
    rho = math.exp(PROX[i] - BEHAVIOR[i])
    return min(rho, 1.2) * ppo(math.exp(POLICY[i] - PROX[i]), ADVANTAGES[i])


def interpolated(i: int) -> float:
    prox = BEHAVIOR[i] + LAGS[i] / (LAGS[i] + 1) * (POLICY[i] - BEHAVIOR[i])
    return min(math.exp(prox - BEHAVIOR[i]), 5.0) * ppo(math.exp(POLICY[i] - prox), ADVANTAGES[i])


def aipo_and_m2po(i: int) -> float:
    keep = float((PROX[i] - BEHAVIOR[i]) ** 2) < 0.03
    return -keep * min(math.exp(POLICY[i] - BEHAVIOR[i]), 5.0) * ADVANTAGES[i] * POLICY[i]


def gipo_and_tis(i: int) -> float:
    gap, rho = POLICY[i] - PROX[i], math.exp(PROX[i] - BEHAVIOR[i])
    return -min(rho, 1.1) * math.exp(-(gap**2) / (2 * 0.3**2)) * math.exp(gap) * ADVANTAGES[i]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {
                "corrections": ("tis", "geo-filter"),
                "options": {"tis.cap": 1.1, "geo-filter.low": 0.95, "geo-filter.high": 1.05},
            },
            tis_and_geo,
        ),
        (
            {
                "loss": "cispo",
                "corrections": ("icepop", "opsm"),
                "options": {"icepop.low": 0.8, "icepop.high": 1.25, "opsm.delta": 0.01},
            },
            icepop_and_opsm,
        ),
        (
            {
                "loss": "gspo",
                "clip_low": 0.05,
                "clip_high": 0.05,
                "corrections": ("seq-tis",),
                "options": {"seq-tis.cap": 0.9},
            },
            gspo_and_seq_tis,
        ),
        ({"loss": "decoupled", "options": {"decoupled.cap": 1.2}}, decoupled),
        ({"loss": "decoupled", "options": {"decoupled.prox": "interpolated"}}, interpolated),
        ({"loss": "aipo", "corrections": ("m2po",)}, aipo_and_m2po),
        (
            {"loss": "gipo", "corrections": ("tis",), "options": {"gipo.sigma": 0.3, "tis.cap": 1.1}},
            gipo_and_tis,
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_compositions_match_their_formulas(
    settings: dict[str, Any], expected: Callable[[int], float]
) -> None:
    outcome = Objective(**settings)(torch.from_numpy(POLICY), inputs(m2po_cutoff=0.03))
    total = sum(WEIGHTS[i] * expected(i) for i in range(NUM_TOKENS))
    assert float(outcome.loss) == pytest.approx(total, rel=1e-9)
    filters = [mask for name, mask in outcome.masked.items() if name != "clip"]
    left_out = torch.stack([torch.zeros(NUM_TOKENS, dtype=torch.bool), *filters]).any(0)
    assert left_out.tolist() == [expected(i) == 0.0 for i in range(NUM_TOKENS)]


def test_each_filter_says_what_it_left_out() -> None:
    objective = Objective(
        corrections=("icepop", "max-k2-filter"), options={"icepop.high": 1.1, "max-k2-filter.limit": 0.05}
    )
    outcome = objective(torch.from_numpy(POLICY), inputs())
    assert tuple(outcome.masked) == objective.causes == ("clip", "icepop", "max-k2-filter")
    rho = np.exp(PROX - BEHAVIOR)
    assert outcome.masked["icepop"].tolist() == ((rho > 1.1) | (rho < 0.5)).tolist()


class HalfSquared:
    """A component over the first half of every sequence's tokens: squared log-probabilities."""

    name, coef = "half", 0.5

    def covers(self, row: PackedRow) -> np.ndarray:
        return row.position_ids < 6

    def loss(self, policy_logprobs_N: torch.Tensor, row: LossInputs) -> torch.Tensor:
        return policy_logprobs_N.square()


@pytest.fixture
def build(make_model: Callable[..., Any], sender: Any) -> Callable[..., TorchTrainer]:
    def make(**settings: Any) -> TorchTrainer:
        settings = {"learning_rate": 3e-3, **settings}
        return TorchTrainer(make_model(), sender=sender, ledger=TimeLedger(TRAINER_ACTIVITIES), **settings)

    return make


@pytest.mark.parametrize("row_tokens", [1, 10_000])
def test_a_further_part_has_a_denominator_of_its_own(
    row_tokens: int, build: Callable[..., TorchTrainer], make_batch: MakeBatch
) -> None:
    batch = make_batch(num_samples=8)
    plain = build(row_tokens=row_tokens).step(batch).metrics
    trainer = build(row_tokens=row_tokens, parts=(HalfSquared(),))
    squares = []
    for rows in trainer.prepare(batch):
        for row in rows:
            logprobs_N = trainer._weights.values(row.tensors).logprobs_N
            covered_N = row.inputs.part_weights_N["half"] > 0
            squares += logprobs_N[covered_N].detach().square().tolist()
    covered = sum(int((s.loss_mask & (np.arange(s.num_tokens) < 6)).sum()) for s in batch.samples)
    assert 0 < len(squares) == covered < sum(s.num_loss_tokens for s in batch.samples)
    metrics = trainer.step(batch).metrics
    assert metrics["half"] == pytest.approx(sum(squares) / covered, rel=1e-5)
    assert metrics["loss"] == pytest.approx(plain["loss"] + 0.5 * metrics["half"], rel=1e-5)


def test_m2po_judges_the_whole_batch_before_the_first_update(
    build: Callable[..., TorchTrainer], make_batch: MakeBatch
) -> None:
    batch = make_batch(num_samples=8)
    trainer = build(
        loss="aipo", corrections=("m2po",), options={"m2po.tau": 0.1}, minibatches=2, row_tokens=20
    )
    rows = [row for part in trainer.prepare(batch) for row in part]
    gaps = torch.cat([row.inputs.prox_logprobs_N - row.inputs.behavior_logprobs_N for row in rows])
    squares = sorted(gaps.double().square().tolist(), reverse=True)
    num_dropped = 0
    while np.mean(squares[num_dropped:]) >= 0.1:
        num_dropped += 1
    assert {row.inputs.m2po_cutoff for row in rows} == {squares[num_dropped - 1]}
    metrics = trainer.step(batch).metrics
    assert metrics["masked_by_m2po"] == pytest.approx(num_dropped / len(squares))
    assert metrics["masked_fraction"] == metrics["masked_by_m2po"] > 0


def test_truncated_completions_are_left_out_of_loss_and_denominator(
    build: Callable[..., TorchTrainer], make_batch: MakeBatch
) -> None:
    batch = make_batch(num_samples=6)
    cut = tuple(
        replace(s, finish_reason="length" if i % 3 == 0 else "stop") for i, s in enumerate(batch.samples)
    )
    rest = replace(batch, samples=tuple(s for i, s in enumerate(batch.samples) if i % 3))
    masked = build(options={"truncated.mode": "mask"}).step(replace(batch, samples=cut))
    expected = build().step(rest)
    kept = build().step(replace(batch, samples=cut))
    assert masked.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-6)
    assert masked.num_loss_tokens == expected.num_loss_tokens < kept.num_loss_tokens
    share = 1 - expected.num_loss_tokens / kept.num_loss_tokens
    assert masked.metrics["masked_by_truncated"] == pytest.approx(share)
    everything = tuple(replace(s, finish_reason="length") for s in batch.samples)
    nothing = build(options={"truncated.mode": "mask"}).step(replace(batch, samples=everything))
    assert nothing.skipped == "no loss tokens" and nothing.metrics["masked_by_truncated"] == 1.0
    # One minibatch of two is left out whole: the other one is the step.
    half = len(batch.samples) // 2
    first = tuple(replace(s, finish_reason="length") for s in batch.samples[:half])
    later = tuple(replace(s, finish_reason="stop") for s in batch.samples[half:])
    one_of_two = build(options={"truncated.mode": "mask"}, minibatches=2)
    result = one_of_two.step(replace(batch, samples=first + later))
    assert result.skipped is None and "behavior_kl" in result.metrics
    alone = build().step(replace(batch, samples=later))
    assert result.metrics["loss"] == pytest.approx(alone.metrics["loss"])


def parameters(trainer: TorchTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_the_guard_stops_before_anything_is_updated(
    build: Callable[..., TorchTrainer], make_batch: MakeBatch
) -> None:
    trainer = build(guard="stop")
    before = parameters(trainer)
    with pytest.raises(TrainingError, match=r"step 1: .*guard\.mismatch = 0\.1.*algo\.guard"):
        trainer.step(make_batch())
    assert all(torch.equal(old, new) for old, new in zip(before, parameters(trainer), strict=True))
    assert all(p.grad is None for p in trainer.model.parameters())


@pytest.mark.parametrize("minibatches", [1, 3])
def test_the_guard_scales_the_learning_rate_by_the_root_of_the_effective_samples(
    minibatches: int, build: Callable[..., TorchTrainer], make_batch: MakeBatch
) -> None:
    options = {"guard.mismatch": 100.0, "guard.effective_samples": 0.9}
    settings = {"loss": "decoupled", "minibatches": minibatches, "grad_clip": None, "options": options}
    result = build(guard="scale", **settings).step(make_batch())
    assert 0 < result.metrics["effective_samples"] < 0.9
    expected = 3e-3 * math.sqrt(result.metrics["effective_samples"])
    assert result.metrics["learning_rate"] == pytest.approx(expected)
    assert "effective_samples = 0.9" in (result.warning or "")


def test_the_guard_warns_once_until_a_step_was_well(
    build: Callable[..., TorchTrainer], make_batch: MakeBatch
) -> None:
    trainer = build(options={"guard.effective_samples": 0.0, "guard.mismatch": 0.3})
    warnings = [trainer.step(make_batch(step)).warning for step in (1, 2)]
    assert warnings[0] is not None and warnings[1] is None
    old = make_batch(3)
    aged = tuple(replace(s, versions=np.where(s.loss_mask, 0, -1).astype(np.int32)) for s in old.samples)
    assert trainer.step(replace(old, samples=aged)).warning is None
    assert trainer.step(make_batch(4)).warning is not None
    assert build(guard="off").step(make_batch()).warning is None
