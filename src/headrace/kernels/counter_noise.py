"""The counter-based noise of a draw, with the integer arithmetic of the engine's sampler, bit for bit.

A row's key mixes its seed key and position, a token's key its id; both are uint64. ``noise_word`` mixes one of
each into 32 bits, and ``exponential`` turns the upper 31 of them into a standard exponential variate.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

# Just under 2**-31, so that the largest value, which float32 rounds up, stays below one.
UNIT = tl.constexpr(2.0**-31 * (1.0 - 2.0**-23))
RATIO_SHIFT = tl.constexpr(32.0862)
"""-log2(UNIT / 2) and the error of one pattern, rounded up."""


@triton.jit
def splitmix(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_key(seed_key, position):
    """From the int64 view of a seed key and an integer position."""
    return splitmix(seed_key.to(tl.uint64) ^ (position.to(tl.uint64) * 0x9E3779B97F4A7C15))


@triton.jit
def noise_word(row_keys, token_keys):
    """The upper uint32 of a mixed pair of keys; its upper 31 bits are the noise. The second product, by
    0xC4CEB9FE1A85EC53, is written out in 32 bits, since only its upper half is wanted."""
    x = (token_keys ^ row_keys) * 0xFF51AFD7ED558CCD
    upper = (x >> 32).to(tl.uint32)
    lower = x.to(tl.uint32) ^ upper
    upper ^= (upper.to(tl.int32, bitcast=True) >> 31).to(tl.uint32, bitcast=True)
    low_factor = tl.full([], 0x1A85EC53, tl.uint32)
    high_factor = tl.full([], 0xC4CEB9FE, tl.uint32)
    return tl.umulhi(lower, low_factor) + lower * high_factor + upper * low_factor


@triton.jit
def exponential(word):
    """float32 -log1p(-u), finite and above zero; log1p by Kahan's quotient, right to a few ulp."""
    u = ((word >> 1).to(tl.float32) + 0.5) * UNIT
    rest = 1.0 - u
    return tl.where(rest == 1.0, u, -tl.log(rest) * (u / (1.0 - rest)))


@triton.jit
def log2_pattern(x):
    """The bits of a positive float32 as an int32: 2**23 * (log2(x) + 127), less at most 0.0861 * 2**23.

    They bound log2(weight / E) for no logarithm at all: E is never below u, u is never below word * UNIT / 2,
    and so it is at most (log2_pattern(weight) - log2_pattern(word)) * 2**-23 + RATIO_SHIFT.
    """
    return x.to(tl.int32, bitcast=True)
