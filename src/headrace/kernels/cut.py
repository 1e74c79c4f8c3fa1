"""Finds where a row of logits is cut by top-k, top-p and min-p, without sorting it.

The kept tokens are always a prefix of the row sorted by (logit descending, id ascending), so one pair describes
them: the last kept logit and, among tokens of equal logit, the last kept id. Both are found by search: the
counts and weights above three thresholds are measured in one pass, which leaves a quarter of the interval.
Thresholds are order-preserving integer images of float32 logits, so the search ends at an exact value.

One or two passes at fixed depths below the maximum find a floor under which nothing is kept. The tokens above
it are listed, when they fit, and all further passes read the list instead of the row.

Weights are in units of exp((x - maximum) / T).

``list_kernel`` lists a kept set from its bits.

Shape legend: V tokens of a tile, W words of 32 tokens each.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.draw import LOG2_E, row_sums

MAX_LISTED = 4096
"""Tokens of a row that can be listed."""
_MAX_DEPTH = tl.constexpr(16.0)
"""How far below the maximum a floor is looked for, in units of the temperature."""


@triton.jit
def ordered(x):
    """int32 with the order of float32."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(image):
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def measure(source, num_tokens, a, b, c, top, rate, TILE: tl.constexpr):
    """How many tokens are at or above each of three thresholds, and what they weigh. Sums are kept by thread until
    the end, so that a pass does not wait at every tile."""
    count_a, weight_a = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.float32)
    count_b, weight_b = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.float32)
    count_c, weight_c = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.float32)
    for start in range(0, num_tokens, TILE):
        i_V = start + tl.arange(0, TILE)
        x_V = tl.load(source + i_V, mask=i_V < num_tokens, other=float("-inf")).to(tl.float32)
        image_V = tl.where(i_V < num_tokens, ordered(x_V), -0x80000000)
        weight_V = tl.exp2((x_V - top) * rate)
        count_a += (image_V >= a).to(tl.int32)
        count_b += (image_V >= b).to(tl.int32)
        count_c += (image_V >= c).to(tl.int32)
        weight_a += tl.where(image_V >= a, weight_V, 0.0)
        weight_b += tl.where(image_V >= b, weight_V, 0.0)
        weight_c += tl.where(image_V >= c, weight_V, 0.0)
    counts = tl.sum(count_a, axis=0), tl.sum(count_b, axis=0), tl.sum(count_c, axis=0)
    weights = tl.sum(weight_a, axis=0), tl.sum(weight_b, axis=0), tl.sum(weight_c, axis=0)
    return counts, weights


@triton.jit
def last_satisfied(source, num_tokens, low, high, min_count, min_weight, top, rate, TILE: tl.constexpr):
    """The largest threshold in [low, high) with at least this many tokens and this weight at or above it;
    ``low`` is taken to have them."""
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        last = high - 1
        a, b = tl.minimum(low + step, last), tl.minimum(low + 2 * step, last)
        c = tl.minimum(low + 3 * step, last)
        counts, weights = measure(
            source, num_tokens, a.to(tl.int32), b.to(tl.int32), c.to(tl.int32), top, rate, TILE
        )
        if (counts[2] >= min_count) & (weights[2] >= min_weight):
            low = c
        elif (counts[1] >= min_count) & (weights[1] >= min_weight):
            low, high = b, c
        elif (counts[0] >= min_count) & (weights[0] >= min_weight):
            low, high = a, b
        else:
            high = a
    return low


@triton.jit
def nth_tie(source, ids, listed, num_tokens, vocab_size, image, n, TILE: tl.constexpr):
    """The n-th smallest id (from 1) among tokens with exactly this logit."""
    low, high = -1, vocab_size - 1
    while high - low > 1:
        middle = (low + high) // 2
        count_V = tl.zeros([TILE], tl.int32)
        for start in range(0, num_tokens, TILE):
            i_V = start + tl.arange(0, TILE)
            x_V = tl.load(source + i_V, mask=i_V < num_tokens, other=float("-inf")).to(tl.float32)
            ids_V = tl.where(listed, tl.load(ids + i_V, mask=(i_V < num_tokens) & listed, other=0), i_V)
            count_V += ((ordered(x_V) == image) & (i_V < num_tokens) & (ids_V <= middle)).to(tl.int32)
        if tl.sum(count_V, axis=0) >= n:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def list_tokens(row_logits, vocab_size, floor, listed_logits, listed_ids, TILE: tl.constexpr):
    """Copy the tokens at or above ``floor``, in order of their ids."""
    num_listed = 0
    for start in range(0, vocab_size, TILE):
        i_V = start + tl.arange(0, TILE)
        raw_V = tl.load(row_logits + i_V, mask=i_V < vocab_size, other=float("-inf"))
        above_V = (ordered(raw_V.to(tl.float32)) >= floor) & (i_V < vocab_size)
        num_above = tl.sum(above_V.to(tl.int32), axis=0)
        if num_above > 0:
            at_V = num_listed + tl.cumsum(above_V.to(tl.int32), axis=0) - 1
            tl.store(listed_logits + at_V, raw_V, mask=above_V)
            tl.store(listed_ids + at_V, i_V, mask=above_V)
            num_listed += num_above
    # What one thread listed, others read.
    tl.debug_barrier()


@triton.jit
def depth_floor(
    row_logits, vocab_size, shallow, deep, top, temperature, min_count, min_weight, TILE: tl.constexpr
):
    """Of the depths at a quarter, half and three quarters between two, the first with enough tokens or weight
    above it, else the deeper of the two; how many tokens are above it (0 if it was not measured); and the
    depth before it."""
    step = (deep - shallow) * 0.25
    a = ordered(top - (shallow + step) * temperature)
    b = ordered(top - (shallow + 2.0 * step) * temperature)
    c = ordered(top - (shallow + 3.0 * step) * temperature)
    counts, weights = measure(row_logits, vocab_size, a, b, c, top, LOG2_E / temperature, TILE)
    depth, count = deep, 0
    if (counts[2] >= min_count) | (weights[2] >= min_weight):
        depth, count = shallow + 3.0 * step, counts[2]
    if (counts[1] >= min_count) | (weights[1] >= min_weight):
        depth, count = shallow + 2.0 * step, counts[1]
    if (counts[0] >= min_count) | (weights[0] >= min_weight):
        depth, count = shallow + step, counts[0]
    return depth, count, depth - step


@triton.jit
def find_floor(
    row_logits,
    vocab_size,
    top,
    total,
    temperature,
    top_k,
    top_p,
    MAX_LISTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The integer image of a logit below which top-k or top-p keeps nothing, and how many tokens are not below
    it, or 0 if none was found. With top-k, top-p is a share of the top k, so all of these must be above it."""
    min_count = tl.where(top_k > 0, top_k, vocab_size + 1)
    min_weight = tl.where((top_k > 0) | (top_p >= 1.0), float("inf"), top_p * total)
    depth, count, before = depth_floor(
        row_logits, vocab_size, 0.0, _MAX_DEPTH, top, temperature, min_count, min_weight, TILE
    )
    if count > MAX_LISTED:
        finer, finer_count, _ = depth_floor(
            row_logits, vocab_size, before, depth, top, temperature, min_count, min_weight, TILE
        )
        if finer_count > 0:
            depth, count = finer, finer_count
    return ordered(top - depth * temperature), count


@triton.jit
def around(source, num_tokens, image, top, rate, TILE: tl.constexpr):
    """How many tokens have exactly this logit; the number and the weight of those above it."""
    here = image.to(tl.int32)
    counts, weights = measure(source, num_tokens, here, here + 1, here + 1, top, rate, TILE)
    return counts[0] - counts[1], counts[1], weights[1]


@triton.jit
def search(source, num_tokens, floor, top, total, rate, top_k, top_p, TILE: tl.constexpr):
    """The last logit kept by top-k and top-p, as an image, how many tokens of exactly that logit are kept,
    and how many there are."""
    high = ordered(top).to(tl.int64) + 1
    image = floor.to(tl.int64)
    num_ties = num_tokens
    num_tied = num_tokens
    if top_k > 0:
        image = last_satisfied(source, num_tokens, image, high, top_k, -1.0, top, rate, TILE)
        num_tied, num_above, weight_above = around(source, num_tokens, image, top, rate, TILE)
        num_ties = tl.minimum(top_k - num_above, num_tied)
        total = weight_above + num_ties * tl.exp2((unordered(image.to(tl.int32)) - top) * rate)
    if top_p < 1.0:
        image_k = image
        image = last_satisfied(source, num_tokens, image, high, 0, top_p * total, top, rate, TILE)
        num_tied, num_above, weight_above = around(source, num_tokens, image, top, rate, TILE)
        weight = tl.maximum(tl.exp2((unordered(image.to(tl.int32)) - top) * rate), 1e-37)
        # In float32 until it is known to be small.
        wanted = tl.ceil((top_p * total - weight_above) / weight)
        wanted = tl.minimum(tl.maximum(wanted, 1.0), num_tied.to(tl.float32)).to(tl.int32)
        num_ties = tl.where(image == image_k, tl.minimum(num_ties, wanted), wanted)
    return image.to(tl.int32), num_ties, num_tied


@triton.jit
def cut_by_rank(
    logits,
    listed_logits,
    listed_ids,
    vocab_size,
    top,
    total,
    temperature,
    top_k,
    top_p,
    MAX_LISTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The last logit kept by top-k and top-p, as an image, and the last kept id of exactly that logit."""
    floor, num_tokens = find_floor(
        logits, vocab_size, top, total, temperature, top_k, top_p, MAX_LISTED, TILE
    )
    listed = (num_tokens > 0) & (num_tokens <= MAX_LISTED)
    if listed:
        list_tokens(logits, vocab_size, floor, listed_logits, listed_ids, TILE)
        source = listed_logits
    else:
        num_tokens = vocab_size
        floor = ordered(tl.full([], float("-inf"), tl.float32))
        source = logits
    image, num_ties, num_tied = search(
        source, num_tokens, floor, top, total, LOG2_E / temperature, top_k, top_p, TILE
    )
    tie_id = vocab_size - 1
    if num_ties < num_tied:
        tie_id = nth_tie(source, listed_ids, listed, num_tokens, vocab_size, image, num_ties, TILE)
    return image, tie_id


@triton.jit
def cut_kernel(
    logits,
    sources,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    tops,
    totals,
    listed_logits,
    listed_ids,
    thresholds,
    tie_ids,
    vocab_size,
    stride_r,
    listed_stride_r,
    num_chunks,
    MAX_CHUNKS: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    greedy = temperature <= 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    top_k = tl.where(greedy | (top_k >= vocab_size), 0, top_k).to(tl.int32)
    top_p = tl.where(greedy, 1.0, top_p)
    min_p = tl.where(greedy, 0.0, min_p)
    top, total = row_sums(tops, totals, row, LOG2_E / temperature, num_chunks, MAX_CHUNKS)
    image = ordered(tl.full([], float("-inf"), tl.float32))
    tie_id = vocab_size - 1
    if (top_k > 0) | (top_p < 1.0):
        image, tie_id = cut_by_rank(
            logits + tl.load(sources + row) * stride_r,
            listed_logits + row.to(tl.int64) * listed_stride_r,
            listed_ids + row * MAX_LISTED,
            vocab_size,
            top,
            total,
            temperature,
            top_k,
            top_p,
            MAX_LISTED,
            TILE,
        )
    # The lowest logit that min-p keeps; never above the maximum.
    lowest = tl.where(min_p > 0.0, top + temperature * tl.log(tl.maximum(min_p, 1e-37)), float("-inf"))
    lowest = ordered(tl.minimum(lowest, top))
    if lowest > image:
        image = lowest
        tie_id = vocab_size - 1
    tl.store(thresholds + row, unordered(image))
    tl.store(tie_ids + row, tie_id)


@triton.jit
def list_kernel(kept_words, list_starts, listed, counts, num_words, WORDS: tl.constexpr):
    """Count the tokens of a kept set and list them by rising id, as far as there is room."""
    row = tl.program_id(0)
    at_W = tl.arange(0, WORDS)
    words_W = tl.load(kept_words + row.to(tl.int64) * num_words + at_W, mask=at_W < num_words, other=0)
    in_word_W = tl.zeros([WORDS], tl.int32)
    for bit in range(32):
        in_word_W += (words_W >> bit) & 1
    up_to_W = tl.cumsum(in_word_W, axis=0)
    tl.store(counts + row, tl.sum(in_word_W, axis=0))
    start, end = tl.load(list_starts + row), tl.load(list_starts + row + 1)
    place_W = start + up_to_W - in_word_W
    for bit in range(32):
        kept_W = (words_W >> bit) & 1
        tl.store(listed + place_W, at_W * 32 + bit, mask=(kept_W != 0) & (place_W < end))
        place_W += kept_W
