"""The head's benchmark measures what it says: all its cases compute the same log-probabilities."""

from __future__ import annotations

import numpy as np
import torch

from headrace.bench import head


def test_the_peer_computes_the_same(monkeypatch):
    monkeypatch.setattr(head, "GATHERED_BYTES", 4096)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 16, generator=generator), torch.randn(64, 16, generator=generator)
    targets = np.random.default_rng(0).integers(0, 64, 40)
    for mean, varied in ((6.0, True), (8.0, False), (64.0, False)):
        kept = head.random_sets(targets, mean, varied=varied, vocab_size=64, device="cpu", seed=1)
        given = hidden, weight, torch.from_numpy(targets), torch.ones(40)
        ours, backward = head._kept(*given, kept)
        peers, peer_backward = head._gathered(*given, kept)
        torch.testing.assert_close(ours().detach(), peers(), atol=1e-5, rtol=0)
        backward(ours())
        peer_backward(peers())
        if mean == 64.0:
            torch.testing.assert_close(ours().detach(), head._whole(*given)[0]().detach(), atol=1e-5, rtol=0)


def test_every_case_is_measured():
    figures = head.run(vocab_size=128, hidden_size=8, num_tokens=12, device="cpu", repeats=1)
    assert [case["case"] for case in figures["cases"]][:2] == ["whole vocabulary", "top-p"]
    assert all(case["forward_s"] > 0 and case["backward_s"] > 0 for case in figures["cases"])
    assert head.table(figures).row_count == len(figures["cases"]) == 7
