"""Counter-based random numbers: the noise of a draw depends only on (seed, position, token id).

In: one (seed, position) pair a row and a vocabulary size. Out: a float32 matrix of standard exponential
variates. Nothing is stored between calls, so a request that is interrupted and resumed, or computed in
another batch, meets the same noise. Small variates, which decide a draw, are resolved to 2**-32.

The hash is the "lowbias32" integer mixer (C. Wellons, 2018) with half of a 64-bit row key entering before
and half between its rounds; left out: any cryptographic claim.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

_MIX_A = 0x7FEB352D
_MIX_B = 0x846CA68B - 2**32
_BELOW_ONE = 1.0 - 2.0**-24


def row_keys(seeds_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """uint64 [R], well mixed from int64 seeds and positions (splitmix64 over both)."""
    with np.errstate(over="ignore"):
        keys = _splitmix(seeds_R.astype(np.uint64))
        return _splitmix(keys ^ (positions_R.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)))


def _splitmix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def exponential(keys_R: np.ndarray, vocab_size: int, device: torch.device) -> torch.Tensor:
    """float32 [R, V] of standard exponential variates, all finite and above zero."""
    halves = torch.from_numpy(keys_R.view(np.int32).reshape(-1, 2)).to(device)
    tokens_V = torch.arange(vocab_size, dtype=torch.int32, device=device) * -1640531527
    x_RV = tokens_V ^ halves[:, :1]
    x_RV = x_RV.bitwise_xor_((x_RV >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_A).add_(halves[:, 1:])
    x_RV = x_RV.bitwise_xor_((x_RV >> 15).bitwise_and_(0x1FFFF)).mul_(_MIX_B)
    x_RV = x_RV.bitwise_xor_((x_RV >> 16).bitwise_and_(0xFFFF))
    # Read as unsigned: the negative half is shifted up; float32 keeps full resolution near zero.
    u_RV = x_RV.to(torch.float32)
    u_RV = torch.where(x_RV < 0, u_RV + 2.0**32, u_RV).add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return u_RV.neg_().log1p_().neg_()
