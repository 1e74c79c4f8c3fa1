"""The same tensors through our objective and through TRL's own ``GRPOTrainer._compute_loss``: value and gradient."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.algos.aggregation import Aggregation, sequence_weights
from headrace.trainers.objective import LossInputs, Objective

trainer_module = pytest.importorskip("trl.trainer.grpo_trainer")

RNG = np.random.default_rng(2)
NUM_SEQUENCES, NUM_STEPS = 6, 9
LENGTHS = np.array([1, 9, 4, 7, 3, 8])
MASK = np.arange(NUM_STEPS)[None] < LENGTHS[:, None]
SAMPLING = -RNG.uniform(0.1, 2.5, MASK.shape)
OLD = SAMPLING + RNG.normal(0, 0.15, MASK.shape)
POLICY = OLD + RNG.normal(0, 0.3, MASK.shape)
REF = SAMPLING + RNG.normal(0, 0.3, MASK.shape)
ADVANTAGES = np.array([1.2, -0.8, 0.5, -1.5, 0.9, -0.3])


def trl_loss(
    policy: torch.Tensor, *, ratio: np.ndarray | None, trainer: Any = None, **changes: Any
) -> torch.Tensor:
    """TRL's method (of ``trainer``; None: GRPO's) on an object that has the attributes it reads, and nothing else of a
    trainer."""
    args = {
        "use_bias_correction_kl": True,
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    own = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "off_policy_mask_threshold": None,
    }
    for name, value in changes.items():
        (args if name in args else own)[name] = value
    mask = torch.from_numpy(MASK.astype(np.float64))
    stub = SimpleNamespace(
        **own,
        args=SimpleNamespace(**args),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        use_vllm=ratio is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=12,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None),
        get_off_policy_mask=trainer_module.GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=trainer_module.GRPOTrainer.get_gamma_weights,
    )
    inputs = {
        "prompt_ids": torch.zeros(NUM_SEQUENCES, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(NUM_SEQUENCES, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(MASK.shape, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": torch.from_numpy(ADVANTAGES),
        "old_per_token_logps": torch.from_numpy(OLD),
        "sampling_per_token_logps": torch.from_numpy(SAMPLING),
        "ref_per_token_logps": torch.from_numpy(REF),
        "num_items_in_batch": mask.sum(),
    }
    if ratio is not None:
        inputs["importance_sampling_ratio"] = torch.from_numpy(ratio)
    return (trainer or trainer_module.GRPOTrainer)._compute_loss(stub, None, inputs)


def our_loss(
    policy: torch.Tensor, objective: Objective, *, behavior: np.ndarray, aggregation: Aggregation
) -> torch.Tensor:
    mask = torch.from_numpy(MASK)

    def tokens(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values)[mask]

    weights = sequence_weights(LENGTHS, aggregation=aggregation, max_tokens=12)
    sequence = np.broadcast_to(np.arange(NUM_SEQUENCES)[:, None], MASK.shape).copy()
    inputs = LossInputs(
        behavior_logprobs_N=tokens(behavior),
        advantages_N=tokens(np.broadcast_to(ADVANTAGES[:, None], MASK.shape).copy()),
        lags_N=torch.zeros(int(MASK.sum()), dtype=torch.int64),
        weights_N=tokens(weights[sequence]),
        sequence_N=tokens(sequence),
        num_sequences=NUM_SEQUENCES,
        prox_logprobs_N=tokens(OLD),
        ref_logprobs_N=tokens(REF) if objective.needs_reference else None,
    )
    return objective(policy[mask], inputs).loss


def ratio_by_trl(level: str, low: float | None, high: float, *, masks: bool) -> np.ndarray:
    """``importance_sampling_ratio`` as TRL prepares it while generating."""
    gap = (OLD - SAMPLING) * MASK
    ratio = np.exp(gap if level == "token" else gap.sum(-1, keepdims=True))
    if masks:
        return np.where((ratio < (low or 0.0)) | (ratio > high), 0.0, ratio)
    return np.clip(ratio, low, high)


TOKEN_MEAN, SEQ_MEAN = "token-mean", "seq-mean-token-mean"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Aggregation]] = {
    "grpo": ({}, {}, SEQ_MEAN),
    "bnpo": ({"loss_type": "bnpo"}, {}, TOKEN_MEAN),
    "dapo": ({"loss_type": "dapo"}, {}, TOKEN_MEAN),
    "dr-grpo": ({"loss_type": "dr_grpo"}, {}, "seq-mean-token-sum-norm"),
    "dual-clip": ({"delta": 1.4}, {"options": {"ppo.dual_clip": 1.4}}, SEQ_MEAN),
    "gspo": (
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
        {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.06},
        SEQ_MEAN,
    ),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.28},
        "seq-mean-token-sum",
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, {"loss": "cispo", "clip_high": 0.3}, TOKEN_MEAN),
    "sapo": ({"loss_type": "sapo"}, {"loss": "sapo"}, SEQ_MEAN),
    "vespo": ({"loss_type": "vespo"}, {"loss": "vespo"}, TOKEN_MEAN),
    "kl-k3": ({"beta": 0.07}, {"kl": "k3", "kl_coef": 0.07}, SEQ_MEAN),
}


def assert_equal(name: str, mine: torch.Tensor, theirs: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    mine.backward()
    theirs.backward()
    assert float(mine.detach()) == pytest.approx(float(theirs.detach()), abs=1e-6, rel=1e-6), name
    gradients = [leaf.grad for leaf in leaves]
    assert gradients[0] is not None and gradients[1] is not None
    assert float(gradients[1].abs().max()) > 1e-3
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-6)


def leaves() -> list[torch.Tensor]:
    return [torch.from_numpy(POLICY.copy()).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_a_loss_anchored_at_the_behaviour_policy_equals_trls(name: str) -> None:
    theirs, ours, aggregation = CASES[name]
    first, second = leaves()
    mine = our_loss(first, Objective(**ours), behavior=OLD, aggregation=aggregation)
    assert_equal(name, mine, trl_loss(second, ratio=None, **theirs), [first, second])


@pytest.mark.filterwarnings("ignore")
def test_the_geometric_mean_equals_trls() -> None:
    """Theirs is a mean over sequences of whole ratios, ours of its token form; value and gradient are the same."""
    theirs = pytest.importorskip("trl.experimental.gmpo").GMPOTrainer
    first, second = leaves()
    objective = Objective(loss="gmpo", clip_low=0.25, clip_high=0.2)
    mine = our_loss(first, objective, behavior=OLD, aggregation=SEQ_MEAN)
    clips = {"epsilon_low": 0.25, "epsilon_high": 0.2}
    assert_equal("gmpo", mine, trl_loss(second, ratio=None, trainer=theirs, **clips), [first, second])


@pytest.mark.parametrize(
    ("correction", "options", "ratio"),
    [
        ("tis", {"tis.cap": 1.1}, ratio_by_trl("token", None, 1.1, masks=False)),
        ("mis", {"mis.cap": 1.1}, ratio_by_trl("token", None, 1.1, masks=True)),
        ("icepop", {"icepop.low": 0.9, "icepop.high": 1.1}, ratio_by_trl("token", 0.9, 1.1, masks=True)),
        ("seq-tis", {"seq-tis.cap": 1.1}, ratio_by_trl("sequence", None, 1.1, masks=False)),
        ("seq-mis", {"seq-mis.cap": 1.1}, ratio_by_trl("sequence", None, 1.1, masks=True)),
    ],
)
@pytest.mark.parametrize("loss", ["ppo", "cispo", "sapo"])
def test_a_weighed_loss_equals_trls(
    loss: str, correction: str, options: dict[str, float], ratio: np.ndarray
) -> None:
    theirs, ours, aggregation = CASES["grpo" if loss == "ppo" else loss]
    first, second = leaves()
    objective = Objective(**ours, corrections=(correction,), options=options)
    mine = our_loss(first, objective, behavior=SAMPLING, aggregation=aggregation)
    assert_equal(correction, mine, trl_loss(second, ratio=ratio, **theirs), [first, second])


@pytest.mark.parametrize("delta", [0.0, 0.05])
def test_off_policy_sequence_masking_equals_trls(delta: float) -> None:
    first, second = leaves()
    objective = Objective(corrections=("tis", "opsm"), options={"opsm.delta": delta, "tis.cap": 1.2})
    mine = our_loss(first, objective, behavior=SAMPLING, aggregation=SEQ_MEAN)
    ratio = ratio_by_trl("token", None, 1.2, masks=False)
    theirs = trl_loss(second, ratio=ratio, off_policy_mask_threshold=delta)
    assert_equal("opsm", mine, theirs, [first, second])
