"""The direction of a KL gradient is decided by finite differences on a small categorical."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.algos.kl import KL_ESTIMATORS, k1, k2, k3

RNG = np.random.default_rng(0)
LOGITS, REF_LOGITS, BEHAVIOR_LOGITS = RNG.normal(size=(3, 7))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def exact_kl(logits: np.ndarray) -> float:
    """KL(policy || ref), written out."""
    policy, ref = log_softmax(logits), log_softmax(REF_LOGITS)
    return float(sum(np.exp(p) * (p - r) for p, r in zip(policy, ref, strict=True)))


def exact_gradient() -> np.ndarray:
    gradient = []
    for i in range(7):
        up, down = LOGITS.copy(), LOGITS.copy()
        up[i] += 1e-6
        down[i] -= 1e-6
        gradient.append((exact_kl(up) - exact_kl(down)) / 2e-6)
    return np.array(gradient)


def expected_gradient(
    estimator: str, behavior_logits: np.ndarray, *, detach_ratio: bool = False
) -> np.ndarray:
    """Gradient of the estimator's expectation over tokens the behaviour policy samples."""
    logits = torch.from_numpy(LOGITS).requires_grad_()
    policy = logits.log_softmax(0)
    behavior = torch.from_numpy(log_softmax(behavior_logits))
    ref = torch.from_numpy(log_softmax(REF_LOGITS))
    if detach_ratio:
        gap = policy - ref
        values = (policy - behavior).exp().detach() * (torch.exp(-gap) - 1 + gap)
    else:
        function = {"k1": k1, "k2": k2, "k3": k3}[estimator]
        values = function(policy_logprobs_T=policy, behavior_logprobs_T=behavior, ref_logprobs_T=ref)
    (behavior.exp() * values).sum().backward()
    assert logits.grad is not None
    return logits.grad.numpy()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("behavior_logits", [LOGITS, BEHAVIOR_LOGITS], ids=["on-policy", "off-policy"])
def test_the_gradient_is_that_of_kl_policy_ref(estimator: str, behavior_logits: np.ndarray) -> None:
    np.testing.assert_allclose(expected_gradient(estimator, behavior_logits), exact_gradient(), atol=1e-8)


def test_k1_as_a_loss_would_hold_nothing() -> None:
    """E[grad log policy] is 0 on the policy's own samples, whatever the reference is."""
    np.testing.assert_allclose(expected_gradient("k1", LOGITS), 0.0, atol=1e-12)
    assert "k1" not in KL_ESTIMATORS


def test_plain_k3_on_policy_has_the_gradient_of_the_other_direction() -> None:
    def other_way(logits: np.ndarray) -> float:
        policy, ref = log_softmax(logits), log_softmax(REF_LOGITS)
        return float(sum(np.exp(r) * (r - p) for p, r in zip(policy, ref, strict=True)))

    numeric = []
    for i in range(7):
        up, down = LOGITS.copy(), LOGITS.copy()
        up[i] += 1e-6
        down[i] -= 1e-6
        numeric.append((other_way(up) - other_way(down)) / 2e-6)
    np.testing.assert_allclose(expected_gradient("k3", LOGITS, detach_ratio=True), numeric, atol=1e-8)


def test_detaching_the_ratio_of_k3_would_turn_the_gradient() -> None:
    detached = expected_gradient("k3", BEHAVIOR_LOGITS, detach_ratio=True)
    assert np.abs(detached - exact_gradient()).max() > 0.05


def test_k3_estimates_the_kl_itself() -> None:
    policy, ref = torch.from_numpy(log_softmax(LOGITS)), torch.from_numpy(log_softmax(REF_LOGITS))
    behavior = torch.from_numpy(log_softmax(BEHAVIOR_LOGITS))
    values = k3(policy_logprobs_T=policy, behavior_logprobs_T=behavior, ref_logprobs_T=ref)
    assert float((behavior.exp() * values).sum()) == pytest.approx(exact_kl(LOGITS), rel=1e-9)
    assert (values >= 0).all()
