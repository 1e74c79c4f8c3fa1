"""The two kernels of a draw: ``scan_kernel`` reads all logits once, ``pick_kernel`` decides.

A draw is argmax(x / T - log E) with E the exponential noise of (row, token). Exact noise costs more than reading
the logits, so the scan keeps, for each chunk of the vocabulary, its maximum, its total weight and an upper bound
on that score, in log2 units above the maximum. The pick then computes exact scores in the chunk with the largest
bound, and goes on to the next chunk only while a bound exceeds the best score found: one chunk, nearly always.

When CUT, tokens outside the kept set (logit > threshold, or equal to it and id <= tie id) do not exist, and the
scan writes the set down as bits. Rows are those of the logits, or the ones that ``sources`` names. Weights are
in units of exp((x - maximum) / T). Temperature 0 is greedy.

Shape legend: R rows of a program, V tokens of a chunk, W words of 32 tokens each, C chunks of the vocabulary.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.counter_noise import RATIO_SHIFT, exponential, log2_pattern, noise_word, row_key

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_CHUNKS = 256
"""Chunks a row is read in at most."""
_SLACK = tl.constexpr(0.01)
"""More than the rounding of a bound."""


@triton.jit
def kept(x, ids, threshold, tie_id):
    return (x > threshold) | ((x == threshold) & (ids <= tie_id))


_BY_ROW = [
    "sources",
    "seed_keys",
    "positions",
    "temperatures",
    "thresholds",
    "tie_ids",
    "token_ids",
    "logprobs",
]
"""Arrays of which some begin anywhere. Kernels are compiled once all the same, and for every number of rows."""


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_BY_ROW)
def scan_kernel(
    logits,
    sources,
    seed_keys,
    positions,
    temperatures,
    token_keys,
    thresholds,
    tie_ids,
    tops,
    totals,
    bounds,
    kept_words,
    num_rows,
    vocab_size,
    stride_r,
    num_words,
    CUT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
):
    chunk = tl.program_id(0)
    rows_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ids_V = chunk * CHUNK + tl.arange(0, CHUNK)
    real_R = rows_R < num_rows
    source_R = rows_R.to(tl.int64) if sources is None else tl.load(sources + rows_R, mask=real_R, other=0)
    at_RV = source_R[:, None] * stride_r + ids_V[None, :]
    real_RV = real_R[:, None] & (ids_V < vocab_size)[None, :]
    x_RV = tl.load(logits + at_RV, mask=real_RV, other=float("-inf")).to(tl.float32)
    if CUT:
        threshold_R = tl.load(thresholds + rows_R, mask=real_R, other=0.0)
        tie_id_R = tl.load(tie_ids + rows_R, mask=real_R, other=0)
        kept_RV = kept(x_RV, ids_V[None, :], threshold_R[:, None], tie_id_R[:, None])
        x_RV = tl.where(kept_RV, x_RV, float("-inf"))
        bits_RV = kept_RV.to(tl.int32) << (ids_V % 32)[None, :]
        words_RW = tl.sum(tl.reshape(bits_RV, (ROWS, CHUNK // 32, 32)), axis=2)
        word_W = chunk * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
        at_RW = rows_R.to(tl.int64)[:, None] * num_words + word_W[None, :]
        tl.store(kept_words + at_RW, words_RW, mask=real_R[:, None] & (word_W < num_words)[None, :])

    temperature_R = tl.load(temperatures + rows_R, mask=real_R, other=1.0)
    rate_R = LOG2_E / tl.where(temperature_R > 0.0, temperature_R, 1.0)
    top_R = tl.max(x_RV, axis=1)
    shift_R = tl.where(top_R == float("-inf"), 0.0, top_R)
    weight_RV = tl.exp2((x_RV - shift_R[:, None]) * rate_R[:, None])
    total_R = tl.sum(weight_RV, axis=1)
    key_R = row_key(
        tl.load(seed_keys + rows_R, mask=real_R, other=0), tl.load(positions + rows_R, mask=real_R, other=0)
    )
    key_V = tl.load(token_keys + ids_V).to(tl.uint64)
    words_RV = noise_word(key_R[:, None], key_V[None, :])
    ratio_R = tl.max(log2_pattern(weight_RV) - log2_pattern(words_RV.to(tl.float32)), axis=1)
    bound_R = tl.where(temperature_R > 0.0, ratio_R * 2.0**-23 + RATIO_SHIFT, 0.0)

    at_R = rows_R * MAX_CHUNKS + chunk
    tl.store(tops + at_R, top_R, mask=real_R)
    tl.store(totals + at_R, total_R, mask=real_R)
    tl.store(bounds + at_R, bound_R, mask=real_R)


@triton.jit
def row_sums(tops, totals, row, rate, num_chunks, MAX_CHUNKS: tl.constexpr):
    """The maximum logit of a row and its total weight, from its chunks."""
    chunks_C = tl.arange(0, MAX_CHUNKS)
    used_C = chunks_C < num_chunks
    tops_C = tl.load(tops + row * MAX_CHUNKS + chunks_C, mask=used_C, other=float("-inf"))
    totals_C = tl.load(totals + row * MAX_CHUNKS + chunks_C, mask=used_C, other=0.0)
    top = tl.max(tops_C, axis=0)
    return top, tl.sum(totals_C * tl.exp2((tops_C - top) * rate), axis=0)


@triton.jit(do_not_specialize_on_alignment=_BY_ROW)
def pick_kernel(
    logits,
    sources,
    seed_keys,
    positions,
    temperatures,
    token_keys,
    thresholds,
    tie_ids,
    tops,
    totals,
    bounds,
    token_ids,
    logprobs,
    vocab_size,
    stride_r,
    num_chunks,
    CUT: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    greedy = temperature <= 0.0
    divisor = tl.where(greedy, 1.0, temperature)
    top, total = row_sums(tops, totals, row, LOG2_E / divisor, num_chunks, MAX_CHUNKS)
    key = row_key(tl.load(seed_keys + row), tl.load(positions + row))
    source = row.to(tl.int64) if sources is None else tl.load(sources + row)
    row_logits = logits + source * stride_r

    chunks_C = tl.arange(0, MAX_CHUNKS)
    at_C = row * MAX_CHUNKS + chunks_C
    tops_C = tl.load(tops + at_C, mask=chunks_C < num_chunks, other=float("-inf"))
    bounds_C = tl.load(bounds + at_C, mask=chunks_C < num_chunks, other=0.0)
    bounds_C = (tops_C - top) / divisor + (bounds_C + _SLACK) / LOG2_E
    best = -float("inf")
    best_id = 0
    bound = tl.max(bounds_C, axis=0)
    while bound > best:
        chunk = tl.argmax(bounds_C, axis=0)
        ids_V = chunk * CHUNK + tl.arange(0, CHUNK)
        x_V = tl.load(row_logits + ids_V, mask=ids_V < vocab_size, other=float("-inf")).to(tl.float32)
        if CUT:
            kept_V = kept(x_V, ids_V, tl.load(thresholds + row), tl.load(tie_ids + row))
            x_V = tl.where(kept_V, x_V, float("-inf"))
        noise_V = exponential(noise_word(key, tl.load(token_keys + ids_V).to(tl.uint64)))
        scores_V = (x_V - top) / divisor - tl.where(greedy, 0.0, tl.log(noise_V))
        found = tl.max(scores_V, axis=0)
        found_id = chunk * CHUNK + tl.argmax(scores_V, axis=0)
        better = (found > best) | ((found == best) & (found_id < best_id))
        best = tl.where(better, found, best)
        best_id = tl.where(better, found_id, best_id)
        bounds_C = tl.where(chunks_C == chunk, float("-inf"), bounds_C)
        bound = tl.max(bounds_C, axis=0)

    logprob = (tl.load(row_logits + best_id).to(tl.float32) - top) / divisor - tl.log(total)
    tl.store(token_ids + row, best_id)
    tl.store(logprobs + row, tl.where(greedy, 0.0, logprob))
