"""The trainer's weights over their real kernels against those without one of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.data.packing import pack
from headrace.models.loading import load_model, make_tiny_model
from headrace.trainers import placement
from headrace.trainers.forward_check import probe_sample
from headrace.trainers.logprobs import row_tensors
from headrace.trainers.placement import place_weights
from headrace.trainers.ranks import ALONE

# Divisions by zero of lanes that are masked, which numpy computes all the same.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def gradients(directory, lengths=(9, 30, 14)):
    """Of the masters' weights, by name; they are made as a trainer of one rank makes them."""
    weights, _ = place_weights(
        load_model(directory), torch.bfloat16, None, False, ranks=ALONE, expert_ranks=1, offload="none"
    )
    rng = np.random.default_rng(4)
    samples = [probe_sample(rng.integers(0, 61, length)) for length in lengths]
    (row,) = pack(samples, row_tokens=sum(lengths))
    weights.values(row_tensors(row, device="cpu")).logprobs_N.sum().backward()
    return {name: p.grad for name, p in weights.model.named_parameters()}


@pytest.mark.parametrize(("family", "num_calls"), [("qwen2", 2), ("qwen3", 0)])
def test_heads_are_turned_by_their_kernel(tmp_path, as_hopper, counted, monkeypatch, family, num_calls):
    from headrace.kernels import turn

    make_tiny_model(
        tmp_path, family=family, vocab_size=61, hidden_size=64, num_heads=4, num_kv_heads=2, num_layers=2,
        context_tokens=64, init_std=0.12, tie_embeddings=False,
    )  # fmt: skip
    calls = counted(turn, "turn_heads", "turn_gradients")
    found = gradients(tmp_path)
    # Heads also in the check that is made of the model before.
    assert calls["turn_gradients"] == num_calls and calls["turn_heads"] == 2 * num_calls
    monkeypatch.setattr(placement, "turn_heads", lambda _: 0)
    expected = gradients(tmp_path)
    assert calls["turn_gradients"] == num_calls
    for name, right in expected.items():
        assert (found[name] - right).norm() < 0.05 * right.norm()
