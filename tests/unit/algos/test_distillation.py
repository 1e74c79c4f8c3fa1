"""Divergences from a teacher: gradients against exact sums, finite differences and full distributions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from headrace.algos import distillation

VOCAB = 7


def random_logits(seed: int, scale: float = 1.5) -> torch.Tensor:
    return scale * torch.randn(VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def exact_reverse(policy_V: torch.Tensor, teacher_V: torch.Tensor) -> torch.Tensor:
    return (policy_V.exp() * (policy_V - teacher_V)).sum()


def exact_forward(policy_V: torch.Tensor, teacher_V: torch.Tensor) -> torch.Tensor:
    return (teacher_V.exp() * (teacher_V - policy_V)).sum()


@pytest.mark.parametrize("baseline", [0.0, 1.7])
@pytest.mark.parametrize("lag", [0.0, 0.3], ids=["on-policy", "stale"])
def test_the_policy_gradient_is_in_expectation_that_of_the_reverse_kl(lag, baseline):
    """Every token that could be drawn, weighed with the probability of drawing it: no noise, no tolerance for it."""
    logits = random_logits(0).requires_grad_()
    teacher = random_logits(1).log_softmax(-1)
    behavior = (logits.detach() + lag * random_logits(2)).log_softmax(-1)
    policy = logits.log_softmax(-1)
    tokens = distillation.sampled(policy, behavior, teacher, baseline=baseline, max_weight=math.inf)
    (behavior.exp() * tokens.loss_T).sum().backward()
    estimated = logits.grad.clone()

    logits.grad = None
    exact = exact_reverse(logits.log_softmax(-1), teacher)
    exact.backward()
    assert estimated.abs().max() > 0.05
    torch.testing.assert_close(estimated, logits.grad, rtol=1e-12, atol=1e-12)
    # So is what people are shown.
    torch.testing.assert_close((behavior.exp() * tokens.value_T).sum(), exact.detach())


def test_a_gap_to_the_behaviour_policy_would_be_another_gradient():
    """Why the gap is taken to the policy: with stale tokens log teacher - log mu points elsewhere."""
    logits = random_logits(0).requires_grad_()
    teacher, behavior = (
        random_logits(1).log_softmax(-1),
        (random_logits(0) + random_logits(2)).log_softmax(-1),
    )
    policy = logits.log_softmax(-1)
    weight = (policy - behavior).exp()
    (behavior.exp() * weight * (behavior - teacher)).sum().backward()
    wrong = logits.grad.clone()
    logits.grad = None
    exact_reverse(logits.log_softmax(-1), teacher).backward()
    assert (wrong - logits.grad).abs().max() > 0.05


def test_weights_are_cut_and_gaps_stay_finite():
    policy = torch.tensor([-0.1, -3.0], requires_grad=True)
    behavior, teacher = torch.tensor([-9.0, -3.0]), torch.tensor([-2.1, -1e4])
    tokens = distillation.sampled(policy, behavior, teacher, max_weight=5.0)
    tokens.loss_T.sum().backward()
    assert policy.grad[0] == pytest.approx(5.0 * 2.0)
    assert torch.isfinite(tokens.loss_T).all() and torch.isfinite(tokens.value_T).all()


@pytest.mark.parametrize("name", ["forward", "reverse"])
@pytest.mark.parametrize("top_k", [1, 3, VOCAB])
def test_gradients_by_finite_differences(name, top_k):
    teacher = random_logits(1).log_softmax(-1)
    top, ids = teacher.topk(top_k)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        at_ids = logits.log_softmax(-1)[ids]
        return distillation.COMPUTED[name](at_ids[None], top[None]).loss_T[0]

    logits = random_logits(0).requires_grad_()
    loss(logits).backward()
    step = 1e-6
    numeric = []
    for v in range(VOCAB):
        shift = torch.zeros(VOCAB, dtype=torch.float64)
        shift[v] = step
        with torch.no_grad():
            numeric.append(float(loss(logits + shift) - loss(logits - shift)) / (2 * step))
    assert np.abs(numeric).max() > 0.05
    np.testing.assert_allclose(logits.grad.numpy(), numeric, atol=1e-8)


@pytest.mark.parametrize(("name", "exact"), [("forward", exact_forward), ("reverse", exact_reverse)])
def test_with_every_token_it_is_the_divergence_itself(name, exact):
    logits, teacher = random_logits(0).requires_grad_(), random_logits(1).log_softmax(-1)
    ids = teacher.argsort(descending=True)
    tokens = distillation.COMPUTED[name](logits.log_softmax(-1)[ids][None], teacher[ids][None])
    expected = exact(logits.log_softmax(-1), teacher)
    assert float(tokens.value_T) == pytest.approx(float(expected.detach()), abs=1e-6)
    (gradient,) = torch.autograd.grad(tokens.loss_T.sum(), logits)
    (wanted,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=0)
    if name == "forward":
        policy = logits.detach().softmax(-1)
        torch.testing.assert_close(gradient, policy - teacher.exp(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "exact"), [("forward", exact_forward), ("reverse", exact_reverse)])
def test_fewer_tokens_never_make_it_larger_and_the_rest_has_a_bucket(name, exact):
    policy, teacher = random_logits(0).log_softmax(-1), random_logits(1).log_softmax(-1)
    order = teacher.argsort(descending=True)
    values = [
        float(distillation.COMPUTED[name](policy[order[:k]][None], teacher[order[:k]][None]).value_T)
        for k in range(1, VOCAB + 1)
    ]
    assert all(b >= a - 1e-6 for a, b in itertools.pairwise(values))
    assert values[0] > 0 and values[-1] == pytest.approx(float(exact(policy, teacher)), abs=1e-5)
    # A student with nothing outside the teacher's entries still feels that the teacher has.
    inside = policy[order[:2]].log_softmax(-1).requires_grad_()
    distillation.COMPUTED[name](inside[None], teacher[order[:2]][None]).loss_T.sum().backward()
    assert torch.isfinite(inside.grad).all() and inside.grad.abs().max() > 0.1


def test_entries_that_are_none_count_nowhere():
    policy, teacher = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-0.7, -1.2, -torch.inf]])
    for name in ("forward", "reverse"):
        whole = distillation.COMPUTED[name](policy.requires_grad_(), teacher)
        fewer = distillation.COMPUTED[name](policy[:, :2].detach(), teacher[:, :2])
        torch.testing.assert_close(whole.value_T, fewer.value_T)
        (gradient,) = torch.autograd.grad(whole.loss_T.sum(), policy)
        assert gradient[0, 2] == 0 and torch.isfinite(gradient).all()
        nothing = distillation.COMPUTED[name](policy.detach(), torch.full((1, 3), -torch.inf))
        assert float(nothing.value_T) == 0
