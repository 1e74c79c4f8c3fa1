"""Inputs for the attention kernels with everything shuffled or poisoned, and attention in float64 to hold them to.

Shape legend: T rows of a pass, B decode rows or blocks, L key-value rows of a sequence, H query heads, K
key-value heads, D key head dim, E value head dim, S rows of a block, W width of a pool row.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter multiplies no bfloat16 matrices.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
# Rounding of bfloat16 operands, and of float32 arithmetic.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-6}


def require_kernels() -> None:
    """Skip the module where Triton cannot run: not installed, or loaded as a compiler without a device."""
    triton = pytest.importorskip("triton")
    if DEVICE.type == "cpu" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip(
            "the interpreter of Triton before 3.7 does not run with numpy 2.4", allow_module_level=True
        )
    if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported before TRITON_INTERPRET was set", allow_module_level=True)
    assert "triton" in sys.modules


@dataclass(frozen=True)
class Heads:
    num: int
    num_kv: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.float32
    block_size: int = 16

    @property
    def width(self) -> int:
        return self.num_kv * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class Cache:
    pool_BSW: torch.Tensor
    tables: torch.Tensor
    keys: list[torch.Tensor]
    """float64 [L, K, D] by sequence."""
    values: list[torch.Tensor]


def make_cache(heads: Heads, lengths: list[int], generator: torch.Generator) -> Cache:
    """Sequences in blocks of shuffled ids; every row that belongs to none is NaN."""
    size = heads.block_size
    needed = [-(-length // size) for length in lengths]
    num_blocks = sum(needed) + 3
    pool_BSW = torch.full((num_blocks, size, heads.width), float("nan"), dtype=heads.dtype)
    ids = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    tables = torch.zeros((len(lengths), max(needed) + 2), dtype=torch.int32)
    keys, values = [], []
    split = heads.num_kv * heads.key_dim
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        blocks = [ids.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        rows_LW = torch.randn((length, heads.width), generator=generator).to(heads.dtype)
        flat = pool_BSW.view(-1, heads.width)
        for i in range(length):
            flat[blocks[i // size] * size + i % size] = rows_LW[i]
        keys.append(rows_LW[:, :split].reshape(length, heads.num_kv, heads.key_dim).double())
        values.append(rows_LW[:, split:].reshape(length, heads.num_kv, heads.value_dim).double())
    return Cache(pool_BSW.to(DEVICE), tables.to(DEVICE), keys, values)


def take_last(cache: Cache, heads: Heads, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the last rows of sequences of these lengths (0: zeros), gone from the pool."""
    rows_BW = torch.zeros((len(lengths), heads.width), dtype=heads.dtype, device=DEVICE)
    for sequence, length in enumerate(lengths):
        if length:
            block = cache.tables[sequence, (length - 1) // heads.block_size]
            place = cache.pool_BSW[block, (length - 1) % heads.block_size]
            rows_BW[sequence] = place
            place.fill_(float("nan"))
    key_BW, value_BW = rows_BW.tensor_split([heads.num_kv * heads.key_dim], dim=1)
    return key_BW.unflatten(1, (heads.num_kv, -1)), value_BW.unflatten(1, (heads.num_kv, -1))


def attend(
    query_THD: torch.Tensor,
    key_LKD: torch.Tensor,
    value_LKE: torch.Tensor,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """float64 [T, H, E]; query t is at position start + t."""
    group = query_THD.shape[1] // key_LKD.shape[1]
    key_LHD = key_LKD.repeat_interleave(group, dim=1)
    value_LHE = value_LKE.repeat_interleave(group, dim=1)
    scores_HTL = torch.einsum("thd,lhd->htl", query_THD.cpu().double(), key_LHD) * scale
    if softcap is not None:
        scores_HTL = torch.tanh(scores_HTL / softcap) * softcap
    position_T1 = start + torch.arange(query_THD.shape[0])[:, None]
    row_L = torch.arange(key_LKD.shape[0])
    hidden_TL = row_L > position_T1
    if window is not None:
        hidden_TL |= row_L <= position_T1 - window
    weights_HTL = torch.softmax(scores_HTL.masked_fill(hidden_TL, float("-inf")), dim=-1)
    return torch.einsum("htl,lhe->the", weights_HTL, value_LHE)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN when the output has one, so that no comparison passes."""
    return float((out.cpu().double() - expected).norm() / expected.norm())


def share_prefix(cache: Cache, heads: Heads, sequences: list[int], length: int) -> None:
    """The first rows of all these sequences become those of the first. Where the others had them in their tables
    there is block 0, full of NaN: nobody may look there."""
    leader, *others = sequences
    for sequence in others:
        cache.tables[sequence, : length // heads.block_size] = 0
        cache.keys[sequence][:length] = cache.keys[leader][:length]
        cache.values[sequence][:length] = cache.values[leader][:length]
