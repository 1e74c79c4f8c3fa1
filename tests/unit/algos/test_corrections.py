from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.algos.corrections import RatioPlan, ratio_plan, truncated_weights
from headrace.errors import ConfigError


def test_truncated_weights_match_their_formula_and_carry_no_gradient() -> None:
    prox, behavior = np.array([-1.0, -0.2, -3.0]), np.array([-2.5, -0.3, -1.0])
    prox_T = torch.from_numpy(prox).requires_grad_()
    weights = truncated_weights(prox_T, torch.from_numpy(behavior), cap=2.0)
    expected = [min(math.exp(p - b), 2.0) for p, b in zip(prox, behavior, strict=True)]
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12)
    assert not weights.requires_grad


def test_every_pairing_names_its_anchor() -> None:
    assert ratio_plan("ppo", "none") == RatioPlan("behavior", False)
    assert ratio_plan("ppo", "tis") == ratio_plan("decoupled", "none") == RatioPlan("prox", True)
    assert ratio_plan("cispo", "tis") == RatioPlan("prox", True)
    assert ratio_plan("gspo", "none") == RatioPlan("behavior", False)


@pytest.mark.parametrize(
    ("loss", "correction", "message"),
    [
        ("decoupled", "tis", "twice"),
        ("gspo", "tis", "sequences"),
        ("ppo", "mis", "unknown"),
        ("trpo", "none", "ppo"),
    ],
)
def test_pairings_that_would_be_wrong_are_refused(loss: str, correction: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ratio_plan(loss, correction)
