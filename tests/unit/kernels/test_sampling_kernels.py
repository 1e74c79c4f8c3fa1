"""Sampling kernels against the engine's CPU sampler: same noise, same draws, same kept tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, require_kernels

from headrace.engines import noise, plain_truncation
from headrace.engines.sampler import Drawn, SamplerRows, sample
from headrace.errors import ModelError

require_kernels()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from headrace.kernels import counter_noise  # noqa: E402
from headrace.kernels.cut import MAX_LISTED  # noqa: E402
from headrace.kernels.sampling import (  # noqa: E402
    MAX_VOCAB,
    sample_rows,
    sample_rows_truncated,
    sample_workspace,
)
from headrace.kernels.truncation import TruncatedDraws, TruncatedRows, new_draws  # noqa: E402

# The interpreter takes its time over each row.
MANY = 1000 if DEVICE.type == "cuda" else 100
SOME = 60 if DEVICE.type == "cuda" else 8


@triton.jit
def noise_kernel(seed_keys, positions, bits, variates, patterns, V: tl.constexpr):
    ids = tl.arange(0, V)
    row = tl.program_id(0)
    key = counter_noise.row_key(tl.load(seed_keys + row), tl.load(positions + row))
    found = counter_noise.noise_word(key, counter_noise.splitmix(ids.to(tl.uint64)))
    tl.store(bits + row * V + ids, (found >> 1).to(tl.int32))
    tl.store(variates + row * V + ids, counter_noise.exponential(found))
    tl.store(patterns + row * V + ids, counter_noise.log2_pattern(found.to(tl.float32)))


def make_rows(count, generator, *, temperatures=(1.0,), top_k=(0,), top_p=(1.0,), min_p=(0.0,)):
    def choose(values, dtype):
        return generator.choice(np.array(values, dtype=dtype), count)

    return SamplerRows(
        temperature=choose(temperatures, np.float32),
        top_k=choose(top_k, np.int64),
        top_p=choose(top_p, np.float32),
        min_p=choose(min_p, np.float32),
        seed_key=np.array(
            [noise.seed_key(int(s)) for s in generator.integers(0, 2**62, count)], dtype=np.uint64
        ),
        position=generator.integers(0, 5000, count),
    )


def on_device(array):
    return torch.from_numpy(array.view(np.int64) if array.dtype == np.uint64 else array).to(DEVICE)


def draw(logits: torch.Tensor, rows: SamplerRows) -> Drawn:
    """As ``sampler.sample``, by the kernels, with poisoned outputs; kept sets are of all rows."""
    if ((rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)).any():
        draws = draw_truncated(logits, rows, np.arange(len(logits)), room=logits.shape[1])
        kept = dict(enumerate(kept_by_bits(draws, logits.shape[1])))
        return Drawn(draws.token_ids.cpu().numpy().astype(np.int64), draws.logprobs.cpu().numpy(), kept)
    count = logits.shape[0]
    ids = torch.full((count,), -7, dtype=torch.int32, device=DEVICE)
    logprobs = torch.full((count,), float("nan"), device=DEVICE)
    sample_rows(
        logits.to(DEVICE),
        on_device(rows.seed_key),
        on_device(rows.position),
        on_device(rows.temperature),
        token_ids_out_R=ids,
        logprobs_out_R=logprobs,
        workspace=sample_workspace(count, DEVICE),
    )
    return Drawn(ids.cpu().numpy().astype(np.int64), logprobs.cpu().numpy(), {})


def draw_truncated(
    logits, rows: SamplerRows, sources: np.ndarray, room: int, *, plainly: bool = False
) -> TruncatedDraws:
    """Draw row q of ``rows`` from the logits that ``sources`` names for it, with room to list so many ids."""
    count, logits = len(sources), logits.to(DEVICE)
    draws = new_draws(count, count * room, logits.shape[1], DEVICE)
    for poisoned in (draws.token_ids, draws.counts, draws.listed, draws.kept_words):
        poisoned.fill_(-7)
    draws.logprobs.fill_(float("nan"))
    given = TruncatedRows(
        sources=on_device(sources),
        seed_keys=on_device(rows.seed_key),
        positions=on_device(rows.position),
        temperatures=on_device(rows.temperature),
        top_k=on_device(rows.top_k),
        top_p=on_device(rows.top_p),
        min_p=on_device(rows.min_p),
        list_starts=on_device(np.arange(count + 1) * room),
    )
    if plainly:
        plain_truncation.draw_truncated(logits, given, draws)
    else:
        sample_rows_truncated(logits, given, draws, sample_workspace(count, DEVICE))
    return draws


def kept_by_bits(draws: TruncatedDraws, vocab_size: int) -> list[np.ndarray]:
    words = draws.kept_words.cpu().numpy()
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, vocab_size:].any()
    return [np.flatnonzero(row) for row in bits]


def peaked_logits(count, vocab_size, seed):
    """Like a model's: a few likely tokens over a long tail."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((count, vocab_size), generator=generator) * 2.0
    logits[:, ::17] += torch.randn((count, len(range(0, vocab_size, 17))), generator=generator) * 4.0
    return logits


def test_noise_is_that_of_the_engine_bit_for_bit():
    generator = np.random.default_rng(0)
    rows = make_rows(40, generator)
    bits = torch.empty((40, 2048), dtype=torch.int32, device=DEVICE)
    variates, patterns = torch.empty((40, 2048), device=DEVICE), torch.empty_like(bits)
    noise_kernel[(40,)](on_device(rows.seed_key), on_device(rows.position), bits, variates, patterns, V=2048)
    keys = noise.row_keys(rows.seed_key, rows.position)
    x = (
        noise._token_keys(2048, torch.device("cpu")) ^ torch.from_numpy(keys.view(np.int64))[:, None]
    ) * noise._MIX_A
    expected = (((x ^ (x >> 32)) * noise._MIX_B) >> 33) & (2**31 - 1)
    assert torch.equal(bits.cpu().long(), expected)
    exponential = noise.exponential(keys, 2048, torch.device("cpu"))
    torch.testing.assert_close(variates.cpu(), exponential, rtol=4e-7, atol=0.0)
    weight = torch.rand((40, 2048), generator=torch.Generator().manual_seed(0))
    ratio = weight.view(torch.int32).long() - patterns.cpu().long()
    slack = ratio.double() * 2.0**-23 + 32.0862 - (weight.double() / exponential.double()).log2()
    assert slack.min() > 0.0 and slack[exponential < 0.01].max() < 0.2


@pytest.mark.parametrize(("count", "vocab_size"), [(MANY, 1000), (3, 5003), (17, 2048)])
def test_draws_are_those_of_the_cpu_sampler(count, vocab_size):
    rows = make_rows(count, np.random.default_rng(count), temperatures=(1.0, 0.7, 1.3, 0.0))
    logits = peaked_logits(count, vocab_size, seed=count)
    expected, drawn = sample(logits, rows), draw(logits, rows)
    np.testing.assert_array_equal(drawn.token_ids, expected.token_ids)
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, rtol=1e-5, atol=2e-6)


def test_draws_from_flat_and_from_certain_rows():
    rows = make_rows(SOME, np.random.default_rng(1), temperatures=(1.0, 0.0))
    logits = torch.zeros((SOME, 3000))
    logits[SOME // 2 :, 1234] = 90.0
    expected, drawn = sample(logits, rows), draw(logits, rows)
    np.testing.assert_array_equal(drawn.token_ids, expected.token_ids)
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, rtol=1e-5, atol=2e-6)
    assert (drawn.token_ids[: SOME // 2][rows.temperature[: SOME // 2] == 0.0] == 0).all()


def test_tokens_of_no_probability_are_never_drawn():
    rows = make_rows(SOME, np.random.default_rng(2))
    logits = peaked_logits(SOME, 4000, seed=2)
    logits[:, 100:3900] = float("-inf")
    expected, drawn = sample(logits, rows), draw(logits, rows)
    np.testing.assert_array_equal(drawn.token_ids, expected.token_ids)
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, rtol=1e-5, atol=2e-6)


def test_a_temperature_near_zero_draws_the_likeliest_token():
    rows = make_rows(SOME, np.random.default_rng(7), temperatures=(1e-5,))
    logits = peaked_logits(SOME, 3000, seed=7) + 50.0
    drawn = draw(logits, rows)
    np.testing.assert_array_equal(drawn.token_ids, logits.argmax(dim=1).numpy())
    np.testing.assert_allclose(drawn.logprobs, 0.0, atol=1e-6)


def test_a_vocabulary_too_large_for_the_kernels_is_refused():
    with pytest.raises(ModelError, match="use another model"):
        draw(torch.zeros((1, MAX_VOCAB + 1)), make_rows(1, np.random.default_rng(0)))


def test_bfloat16_logits_are_read_as_they_are():
    rows = make_rows(SOME, np.random.default_rng(3), temperatures=(1.0, 0.8, 0.0))
    logits = peaked_logits(SOME, 2500, seed=3).bfloat16()
    expected, drawn = sample(logits.float(), rows), draw(logits, rows)
    np.testing.assert_array_equal(drawn.token_ids, expected.token_ids)
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, rtol=1e-5, atol=2e-6)


def check_truncated(logits, rows):
    """Kept sets equal but for a token at the very edge of top-p or min-p; draws equal where kept sets are."""
    expected, drawn = sample(logits.float(), rows), draw(logits, rows)
    edges = 0
    for row in range(logits.shape[0]):
        if row not in expected.kept:
            assert len(drawn.kept[row]) == logits.shape[1]
        elif not np.array_equal(drawn.kept[row], expected.kept[row]):
            edges += 1
            assert len(np.setxor1d(drawn.kept[row], expected.kept[row])) == 1
            continue
        assert drawn.token_ids[row] == expected.token_ids[row]
        np.testing.assert_allclose(drawn.logprobs[row], expected.logprobs[row], rtol=1e-5, atol=3e-6)
    return edges


@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": (1, 7, 100, 2999, 5000)},
        {"top_p": (0.0, 0.1, 0.9, 0.999)},
        {"min_p": (0.05, 0.5, 1.0)},
        {"top_k": (0, 3, 50), "top_p": (1.0, 0.5, 0.95), "min_p": (0.0, 0.02)},
    ],
)
def test_truncation_keeps_the_tokens_the_cpu_sampler_keeps(limits):
    rows = make_rows(SOME, np.random.default_rng(4), temperatures=(1.0, 0.6, 0.0), **limits)
    assert check_truncated(peaked_logits(SOME, 3000, seed=4), rows) == 0


@pytest.mark.parametrize("limits", [{"top_k": (1, 40, 700)}, {"top_p": (0.3, 0.9)}, {"min_p": (0.2,)}])
def test_ties_at_the_cut_go_to_the_lower_token_id(limits):
    rows = make_rows(SOME, np.random.default_rng(5), **limits)
    logits = (peaked_logits(SOME, 2200, seed=5) * 0.5).round()
    logits[0] = 0.0
    assert check_truncated(logits, rows) <= 1
    assert check_truncated(logits.bfloat16(), rows) <= 1


@pytest.mark.parametrize("room", [0, 7, 1111])
def test_truncated_draws_are_those_of_the_plain_form(room):
    limits = {"top_k": (0, 3, 7, 8, 300, 5000), "top_p": (1.0, 0.95), "min_p": (0.0, 0.01)}
    rows = make_rows(3 * SOME, np.random.default_rng(9), temperatures=(1.0, 0.6, 0.0), **limits)
    logits = (peaked_logits(4 * SOME, 1111, seed=9) * 16.0).round() / 16.0
    sources = np.random.default_rng(9).permutation(4 * SOME)[: 3 * SOME]
    drawn, expected = (
        draw_truncated(logits, rows, sources, room, plainly=plainly) for plainly in (False, True)
    )
    for name in ("token_ids", "counts", "listed", "kept_words"):
        np.testing.assert_array_equal(getattr(drawn, name).cpu(), getattr(expected, name).cpu(), name)
    torch.testing.assert_close(drawn.logprobs, expected.logprobs, rtol=1e-5, atol=3e-6)
    assert (drawn.counts.min() <= 3) and drawn.counts.max() == 1111


def test_more_kept_tokens_than_the_search_can_list():
    rows = make_rows(4, np.random.default_rng(6), temperatures=(3.0,), top_p=(0.97,))
    logits = torch.randn((4, 3 * MAX_LISTED), generator=torch.Generator().manual_seed(6))
    expected, drawn = sample(logits, rows), draw(logits, rows)
    for row in range(4):
        # Thousands of tokens near the cut differ by less than the rounding of the mass above it.
        assert len(expected.kept[row]) > MAX_LISTED
        assert abs(len(drawn.kept[row]) - len(expected.kept[row])) <= 3
    np.testing.assert_array_equal(drawn.token_ids, expected.token_ids)
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, rtol=1e-5, atol=3e-6)
