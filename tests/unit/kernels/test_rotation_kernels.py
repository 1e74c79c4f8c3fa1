"""Queries and keys rotated where attention reads them: the same as rotated before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import (
    DEVICE,
    HALF,
    TOLERANCE,
    Heads,
    make_cache,
    relative_error,
    require_kernels,
    take_last,
)

require_kernels()

from headrace.kernels.dealing import spans_of_rows  # noqa: E402
from headrace.kernels.decode_attention import decode_attention, decode_workspace  # noqa: E402
from headrace.kernels.paged_attention import prefill_attention, write_rows  # noqa: E402
from headrace.kernels.rotation import Rotation, rotated  # noqa: E402
from headrace.kernels.shared_prefixes import SharedPrefixes  # noqa: E402

# Of a power of two and not; keys wider than values; single and several heads a key.
HEADS = [
    Heads(14, 2, 64, 64),
    Heads(12, 2, 128, 128, HALF),
    Heads(4, 4, 80, 80),
    Heads(6, 1, 96, 64, HALF, block_size=32),
]


def random_rotation(num_rows, heads, generator):
    """Angles of their own for every number: nothing is the same in both halves of a head."""
    angles = torch.randn((2, num_rows, heads.key_dim), generator=generator) * 3.0
    # As models hand them over: behind one another, in their own dtype.
    return Rotation(*torch.stack((angles[0].cos(), angles[1].sin())).to(heads.dtype).to(DEVICE))


def numbers(*shape, heads, generator):
    return torch.randn(shape, generator=generator).to(heads.dtype).to(DEVICE)


def same_pool(one, other):
    """Rounding of a fused multiplication apart; NaN in the same places."""
    tolerance = 1e-6 if one.dtype == torch.float32 else 2e-2
    return torch.allclose(one.float(), other.float(), atol=tolerance, rtol=tolerance, equal_nan=True)


def prefixes_of(num_rows, rows, prefix):
    begins = torch.zeros(num_rows, dtype=torch.int32)
    begins[rows] = prefix
    members = torch.tensor([*rows, *[num_rows] * (num_rows - len(rows))], dtype=torch.int32)
    starts = torch.zeros(num_rows // 2 + 1, dtype=torch.int32)
    starts[1:] = len(rows)
    one = torch.ones(1, dtype=torch.int32)
    return SharedPrefixes(*(tensor.to(DEVICE) for tensor in (begins, members, starts, one)))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("shared", [False, True])
def test_decode_rotates_as_it_reads(heads, shared):
    generator = torch.Generator().manual_seed(0)
    lengths = [70, 1, 0, 300, 129, 40]
    cache = make_cache(heads, [max(length, 1) for length in lengths], generator)
    cache.tables[3, :2] = cache.tables[0, :2]
    prefixes = prefixes_of(len(lengths), [0, 3], 32) if shared else None
    key, value = take_last(cache, heads, lengths)
    query = numbers(len(lengths), heads.num, heads.key_dim, heads=heads, generator=generator)
    rotation = random_rotation(len(lengths), heads, generator)
    workspace = decode_workspace(len(lengths), heads.num, heads.value_dim, 512, DEVICE)
    found = []
    for given, turned in (
        ((query, key), rotation),
        ((rotated(query, rotation), rotated(key, rotation)), None),
    ):
        pool = cache.pool_BSW.clone()
        out = torch.full(
            (len(lengths), heads.num, heads.value_dim), float("nan"), dtype=heads.dtype, device=DEVICE
        )
        decode_attention(
            *given, value, pool, cache.tables, torch.arange(len(lengths), device=DEVICE),
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE), scale=heads.key_dim**-0.5, shared=prefixes,
            rotation=turned, spans=spans_of_rows(np.array(lengths), 6, DEVICE), out_BHE=out,
            workspace=workspace,
        )  # fmt: skip
        found.append((out, pool))
    (out, pool), (expected, expected_pool) = found
    assert relative_error(out, expected.cpu().double()) < TOLERANCE[heads.dtype]
    assert same_pool(pool, expected_pool)
    assert not same_pool(pool, cache.pool_BSW), "keys were written"


@pytest.mark.parametrize("heads", HEADS)
def test_prompts_are_rotated_as_they_are_written_and_read(heads):
    generator = torch.Generator().manual_seed(1)
    count, start = 50, 33
    cache = make_cache(heads, [start + count], generator)
    size = heads.block_size
    at = torch.arange(start, start + count, device=DEVICE)
    places = cache.tables[0].long()[at // size] * size + at % size
    query = numbers(count, heads.num, heads.key_dim, heads=heads, generator=generator)
    # Rows of keys are parts of longer ones.
    key = numbers(count, heads.num_kv, 2 * heads.key_dim, heads=heads, generator=generator)[
        ..., : heads.key_dim
    ]
    value = numbers(count, heads.num_kv, heads.value_dim, heads=heads, generator=generator)
    rotation = random_rotation(count, heads, generator)
    one = {"dtype": torch.int32, "device": DEVICE}
    found = []
    for given, turned in (
        ((query, key), rotation),
        ((rotated(query, rotation), rotated(key, rotation)), None),
    ):
        pool = cache.pool_BSW.clone()
        write_rows(pool, places, given[1], value, turned)
        out = torch.full((count, heads.num, heads.value_dim), float("nan"), dtype=heads.dtype, device=DEVICE)
        prefill_attention(
            given[0], pool, cache.tables, slots=torch.zeros(1, **one), starts=torch.tensor([start], **one),
            counts=torch.tensor([count], **one), offsets=torch.zeros(1, **one), value_dim=heads.value_dim,
            scale=heads.key_dim**-0.5, rotation=turned, out_THE=out,
        )  # fmt: skip
        found.append((out, pool))
    (out, pool), (expected, expected_pool) = found
    assert relative_error(out, expected.cpu().double()) < TOLERANCE[heads.dtype]
    assert same_pool(pool, expected_pool)
