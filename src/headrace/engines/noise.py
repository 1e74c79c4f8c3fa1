"""Counter-based random numbers: the noise of a draw depends only on (seed, position, token id).

In: one (seed, position) pair a row and a vocabulary size. Out: a float32 matrix of standard exponential
variates. Nothing depends on earlier calls, so a request that is interrupted and resumed, or computed in
another batch, meets the same noise. Small variates, which decide a draw, are resolved to 2**-31.

Tokens and rows get 64-bit keys from splitmix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
Generators", 2014); a variate mixes one of each by two multiplications and keeps the upper bits. Left
out: any cryptographic claim.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = 0xFF51AFD7ED558CCD - 2**64
_MIX_B = 0xC4CEB9FE1A85EC53 - 2**64
_KEPT_BITS = 31
_AHEAD = 8
_AHEAD_MAX_VALUES = 2**17
# Just under 2**-31, so that the largest value, which float32 rounds up, stays below one.
_UNIT = 2.0**-_KEPT_BITS * (1.0 - 2.0**-23)


def seed_key(seed: int) -> int:
    """The part of a row's key that stays the same for a whole request."""
    x = (seed + int(_GOLDEN)) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def row_keys(seed_keys_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """uint64 [R], well mixed from ``seed_key`` values and int64 positions."""
    return _splitmix(seed_keys_R ^ (positions_R.astype(np.uint64) * _GOLDEN))


def exponential(keys_R: np.ndarray, vocab_size: int, device: torch.device) -> torch.Tensor:
    """float32 [R, V] of standard exponential variates, all finite and above zero."""
    keys_R1 = torch.from_numpy(keys_R.view(np.int64)).to(device).unsqueeze(1)
    x_RV = (_token_keys(vocab_size, device) ^ keys_R1).mul_(_MIX_A)
    x_RV = x_RV.bitwise_xor_(x_RV >> 32).mul_(_MIX_B)
    x_RV = x_RV.bitwise_right_shift_(64 - _KEPT_BITS).bitwise_and_(2**_KEPT_BITS - 1)
    # Float32 rounds only large values here, so the small ones, which decide, keep all their bits.
    u_RV = x_RV.to(torch.float32).add_(0.5).mul_(-_UNIT)
    return u_RV.log1p_().neg_()


class NoiseAhead:
    """``exponential`` for rows that mostly go on from one call to the next: several positions are computed
    at once when the same rows came back, and kept for the calls that follow."""

    def __init__(self) -> None:
        self._seed_keys = np.zeros(0, dtype=np.uint64)
        self._expected = np.zeros(0, dtype=np.int64)
        self._ready: list[torch.Tensor] = []

    def take(
        self, seed_keys_R: np.ndarray, positions_R: np.ndarray, vocab_size: int, device: torch.device
    ) -> torch.Tensor:
        """float32 [R, V], the same numbers as ``exponential(row_keys(...), ...)``; not to be changed."""
        goes_on = np.array_equal(positions_R, self._expected) and np.array_equal(seed_keys_R, self._seed_keys)
        if not (goes_on and self._ready):
            small = len(positions_R) * vocab_size <= _AHEAD_MAX_VALUES // _AHEAD
            count = _AHEAD if goes_on and small else 1
            ahead = positions_R + np.arange(count)[:, None]
            keys = row_keys(np.broadcast_to(seed_keys_R, ahead.shape), ahead).reshape(-1)
            noise = exponential(keys, vocab_size, device).view(count, len(positions_R), vocab_size)
            self._ready = list(noise.unbind()[::-1])
        self._seed_keys, self._expected = seed_keys_R, positions_R + 1
        return self._ready.pop()


def _splitmix(x: np.ndarray) -> np.ndarray:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=4)
def _token_keys(vocab_size: int, device: torch.device) -> torch.Tensor:
    """int64 [V], the same for every call."""
    return torch.from_numpy(_splitmix(np.arange(vocab_size, dtype=np.uint64)).view(np.int64)).to(device)
