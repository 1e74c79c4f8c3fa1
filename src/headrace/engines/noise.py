"""Counter-based random numbers: the noise of a draw depends only on (seed, position, token id).

In: one (seed, position) pair a row and a vocabulary size. Out: a float32 matrix of standard exponential
variates. Nothing is stored between calls, so a request that is interrupted and resumed, or computed in
another batch, meets the same noise. Small variates, which decide a draw, are resolved to 2**-31.

The hash is the "lowbias32" integer mixer (C. Wellons, 2018) with half of a 64-bit row key entering before
and half between its rounds; left out: any cryptographic claim.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

_SPREAD = 0x9E3779B9 - 2**32
_MIX_A = 0x7FEB352D
_MIX_B = 0x846CA68B - 2**32
_BELOW_ONE = 1.0 - 2.0**-24


def seed_key(seed: int) -> int:
    """The part of a row's key that stays the same for a whole request."""
    return int(_splitmix(np.array([seed % 2**64], dtype=np.uint64))[0])


def row_keys(seed_keys_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """uint64 [R], well mixed from ``seed_key`` values and int64 positions."""
    return _splitmix(seed_keys_R ^ (positions_R.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)))


def _splitmix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def exponential(keys_R: np.ndarray, vocab_size: int, device: torch.device) -> torch.Tensor:
    """float32 [R, V] of standard exponential variates, all finite and above zero."""
    halves = torch.from_numpy(keys_R.view(np.int32).reshape(-1, 2)).to(device)
    tokens_V = torch.arange(vocab_size, dtype=torch.int32, device=device).mul_(_SPREAD)
    x_RV = tokens_V ^ halves[:, :1]
    x_RV.bitwise_xor_((x_RV >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_A).add_(halves[:, 1:])
    x_RV.bitwise_xor_((x_RV >> 15).bitwise_and_(0x1FFFF)).mul_(_MIX_B)
    x_RV.bitwise_xor_((x_RV >> 16).bitwise_and_(0xFFFF)).bitwise_and_(0x7FFFFFFF)
    # Float32 rounds only large values, so the small ones, which decide, keep all 31 bits.
    u_RV = x_RV.to(torch.float32).add_(0.5).mul_(-(2.0**-31)).clamp_(min=-_BELOW_ONE)
    return u_RV.log1p_().neg_()
