"""Noise that depends on (seed, position, token) alone, and the distribution drawn from it."""

from __future__ import annotations

import numpy as np
import torch

from headrace.engines.noise import NoiseAhead, exponential, row_keys, seed_key
from headrace.engines.sampler import SamplerRows, sample

CPU = torch.device("cpu")


def rows(count, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, first=0):
    return SamplerRows(
        temperature=np.full(count, temperature, dtype=np.float32),
        top_k=np.full(count, top_k, dtype=np.int64),
        top_p=np.full(count, top_p, dtype=np.float32),
        min_p=np.full(count, min_p, dtype=np.float32),
        seed_key=np.full(count, seed_key(seed), dtype=np.uint64),
        position=np.arange(first, first + count, dtype=np.int64),
    )


def keys(seeds, positions):
    return row_keys(np.array([seed_key(s) for s in seeds], dtype=np.uint64), np.array(positions))


def test_noise_depends_on_seed_position_and_token_alone():
    together = exponential(keys([1, 1, 2], [0, 1, 0]), 100, CPU)
    assert torch.equal(exponential(keys([1], [1]), 100, CPU)[0], together[1])
    assert torch.equal(exponential(keys([2], [0]), 40, CPU)[0], together[2, :40])
    assert not torch.equal(together[0], together[1]) and not torch.equal(together[0], together[2])


def test_noise_is_standard_exponential():
    noise = exponential(keys([3] * 400, range(400)), 2000, CPU).numpy().astype(np.float64)
    assert np.isfinite(noise).all() and noise.min() > 0 and noise.min() < 1e-5 and noise.max() > 12
    quantiles = np.array([1e-4, 0.01, 0.1, 0.5, 0.9, 0.99])
    np.testing.assert_allclose(np.quantile(noise, quantiles), -np.log1p(-quantiles), rtol=0.1)
    assert abs(np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]) < 5e-3
    assert abs(np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1]) < 5e-3


def test_noise_computed_ahead_is_the_same_noise():
    ahead, generator = NoiseAhead(), np.random.default_rng(0)
    seeds, positions = np.array([seed_key(s) for s in range(3)], dtype=np.uint64), np.array([0, 5, 9])
    for _ in range(60):
        if generator.random() < 0.1:
            positions = generator.integers(0, 50, 3)
        if generator.random() < 0.1:
            seeds = np.roll(seeds, 1)
        expected = exponential(row_keys(seeds, positions), 70, CPU)
        assert torch.equal(ahead.take(seeds, positions, 70, CPU), expected)
        positions = positions + 1


def test_extreme_hashes_give_finite_noise():
    noise = exponential(np.random.default_rng(0).integers(0, 2**63, 64).astype(np.uint64), 32768, CPU)
    assert torch.isfinite(noise.log()).all()


def test_draws_follow_the_softmax_and_logprobs_are_its():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    drawn = sample(logits.expand(20000, 5), rows(20000, temperature=0.7))
    expected = torch.log_softmax(logits / 0.7, -1).numpy()
    np.testing.assert_allclose(drawn.logprobs, expected[drawn.token_ids], atol=1e-6)
    shares = np.bincount(drawn.token_ids, minlength=5) / 20000
    np.testing.assert_allclose(shares, np.exp(expected), atol=4 * np.sqrt(0.25 / 20000))


def test_greedy_takes_the_largest_with_logprob_zero():
    logits = torch.randn((8, 30), generator=torch.Generator().manual_seed(0))
    drawn = sample(logits, rows(8, temperature=0.0))
    np.testing.assert_array_equal(drawn.token_ids, logits.argmax(-1).numpy())
    np.testing.assert_array_equal(drawn.logprobs, np.zeros(8, dtype=np.float32))


def test_greedy_and_sampled_rows_do_not_disturb_each_other():
    logits = torch.randn((6, 30), generator=torch.Generator().manual_seed(0))
    plain = sample(logits, rows(6))
    mixed_rows = rows(6)
    mixed_rows.temperature[::2] = 0.0
    mixed = sample(logits, mixed_rows)
    np.testing.assert_array_equal(mixed.token_ids[1::2], plain.token_ids[1::2])
    np.testing.assert_array_equal(mixed.logprobs[1::2], plain.logprobs[1::2])
    np.testing.assert_array_equal(mixed.token_ids[::2], logits[::2].argmax(-1).numpy())


def kept_by_hand(logits, *, top_k, top_p, min_p):
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k:
        order = order[:top_k]
    probs = np.exp(np.array([logits[token] for token in order], dtype=np.float64))
    probs /= probs.sum()
    kept, mass = [], 0.0
    for token, prob in zip(order, probs, strict=True):
        if kept and (mass >= top_p or prob < min_p * probs[0]):
            break
        kept.append(token)
        mass += prob
    return sorted(kept)


def test_truncation_matches_a_written_out_reference():
    generator = np.random.default_rng(0)
    for settings in (
        {"top_k": 3, "top_p": 1.0, "min_p": 0.0},
        {"top_k": 0, "top_p": 0.6, "min_p": 0.0},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.2},
        {"top_k": 7, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 500, "top_p": 0.01, "min_p": 0.0},
    ):
        logits = generator.normal(0, 2, (50, 12)).astype(np.float32)
        drawn = sample(torch.from_numpy(logits), rows(50, **settings))
        for row in range(50):
            kept = kept_by_hand(logits[row], **settings)
            assert drawn.kept[row].tolist() == kept
            assert drawn.token_ids[row] in kept
            expected = logits[row, drawn.token_ids[row]] - np.log(np.exp(logits[row, kept]).sum())
            assert abs(drawn.logprobs[row] - expected) < 1e-5
