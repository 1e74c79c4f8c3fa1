"""Attention kernels against float64, with shuffled blocks, NaN in every row nobody owns, and poisoned outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import (
    DEVICE,
    HALF,
    TOLERANCE,
    Heads,
    attend,
    make_cache,
    relative_error,
    require_kernels,
    take_last,
)

require_kernels()

from headrace.kernels import decode_attention as attention  # noqa: E402
from headrace.kernels.chip import Chip  # noqa: E402
from headrace.kernels.dealing import most_spans, spans_of_rows  # noqa: E402
from headrace.kernels.decode_attention import decode_attention, decode_workspace  # noqa: E402
from headrace.kernels.paged_attention import prefill_attention, write_rows  # noqa: E402
from headrace.kernels.prefill import PIECES_AT_ONCE  # noqa: E402

FP32 = torch.float32


def poisoned(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def decode(heads, lengths, *, seed=0, workspace=None, at_once=24, **options):
    """Relative error of a decode pass over these lengths, dealt out to so many spans; 0 is a padding row."""
    generator = torch.Generator().manual_seed(seed)
    cache = make_cache(heads, [max(length, 1) for length in lengths], generator)
    order = torch.randperm(len(lengths), generator=generator)
    query = torch.randn((len(lengths), heads.num, heads.key_dim), generator=generator).to(heads.dtype)
    out = poisoned(len(lengths), heads.num, heads.value_dim, dtype=heads.dtype)
    workspace = workspace or decode_workspace(len(lengths), heads.num, heads.value_dim, 4096, DEVICE)
    scale = heads.key_dim**-0.5
    whole = cache.pool_BSW.clone()
    key, value = take_last(cache, heads, lengths)
    decode_attention(
        query.to(DEVICE),
        key[order.to(DEVICE)],
        value[order.to(DEVICE)],
        cache.pool_BSW,
        cache.tables,
        order.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32)[order].to(DEVICE),
        scale=scale,
        spans=spans_of_rows(np.array(lengths)[order.numpy()], at_once, DEVICE),
        out_BHE=out,
        workspace=workspace,
        **options,
    )
    assert torch.equal(cache.pool_BSW.nan_to_num(7.0), whole.nan_to_num(7.0)), (
        "keys and values in their places"
    )
    expected = torch.zeros(out.shape, dtype=torch.float64)
    for row, sequence in enumerate(order.tolist()):
        if lengths[sequence] > 0:
            expected[row] = attend(
                query[row : row + 1],
                cache.keys[sequence],
                cache.values[sequence],
                lengths[sequence] - 1,
                scale=scale,
                **options,
            )[0]
    return relative_error(out, expected)


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        (Heads(14, 2, 64, 64), [1, 15, 16, 17, 128, 129, 300]),
        (Heads(12, 2, 128, 128, HALF), [1, 127, 0, 700]),
        (Heads(28, 4, 32, 32, HALF), [65, 0, 0, 513]),
        (Heads(4, 4, 80, 80), [31, 160]),
        (Heads(6, 1, 96, 64, HALF, block_size=32), [33, 400]),
        (Heads(2, 1, 256, 256, HALF), [40, 290]),
        (Heads(24, 2, 128, 128, HALF), [1, 64, 65, 700]),
        (Heads(16, 1, 64, 64, HALF), [0, 129, 513]),
        (Heads(32, 1, 128, 128, HALF), [33, 300]),
        (Heads(71, 1, 64, 64, HALF), [16, 90]),
    ],
)
def test_decode_matches_float64(heads, lengths):
    assert decode(heads, lengths) < TOLERANCE[heads.dtype]


@pytest.mark.parametrize("options", [{}, {"window": 21}], ids=["whole blocks", "tiles that begin anywhere"])
@pytest.mark.parametrize(("num_multiprocessors", "tile"), [(16, 64), (6, 32), (1, 16)])
@pytest.mark.parametrize("group", [2, 12])
def test_the_more_rows_a_multiprocessor_has_the_smaller_are_tiles(
    monkeypatch, options, num_multiprocessors, tile, group
):
    """What lies behind the last row of a block is not a number."""
    shapes = []
    chosen = attention.decode_shape
    monkeypatch.setattr(attention, "chip", lambda device: Chip(9, num_multiprocessors))
    monkeypatch.setattr(
        attention, "decode_shape", lambda *given, **how: shapes.append(chosen(*given, **how)) or shapes[-1]
    )
    heads, lengths = Heads(2 * group, 2, 128, 128, HALF), [1, 0, 16, 17, 33, 15, 47, 48]
    assert decode(heads, lengths, **options) < TOLERANCE[HALF]
    assert [shape[0] for shape in shapes] == [tile]


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 20}, {"window": 200}, {"softcap": 1.5}])
def test_decode_with_a_window_or_a_soft_cap(options):
    assert decode(Heads(7, 1, 64, 64), [1, 5, 20, 21, 260, 500], **options) < TOLERANCE[FP32]


def spans_used(heads, lengths, **options):
    """Of each sequence, in order of their number; 0: one, which is written straight to the output."""
    workspace = decode_workspace(len(lengths), heads.num, heads.value_dim, 4096, DEVICE)
    workspace.stats.fill_(float("nan"))
    assert decode(heads, lengths, workspace=workspace, **options) < TOLERANCE[heads.dtype]
    left = workspace.stats.view(-1, heads.num, 2)[:, 0, 0]
    return int((~left.isnan()).sum())


@pytest.mark.parametrize(
    ("lengths", "at_once", "options", "expected"),
    [
        pytest.param([2000, 1000, 700], 8, {}, 4 + 2 + 2, id="a longer row is split further"),
        pytest.param([3000, *[20] * 5], 16, {}, 11, id="a row that is far longer"),
        pytest.param([1500, 100, 100], 2, {}, 2, id="longer than an even share, with no room for more"),
        pytest.param([200, 250], 24, {}, 0, id="too short to be split"),
        pytest.param([3000, 3000], 16, {"window": 600}, 2 + 2, id="a window, of which no more are read"),
    ],
)
def test_rows_are_split_into_the_spans_of_the_list(lengths, at_once, options, expected):
    assert spans_used(Heads(4, 2, 32, 32), lengths, at_once=at_once, **options) == expected


def test_there_is_room_for_every_span():
    for max_rows in (1, 7, 25, 60, 400):
        workspace = decode_workspace(max_rows, 8, 16, 1 << 20, DEVICE)
        for num_kv in (1, 2, 8):
            for rows in range(1, max_rows + 1):
                at_once = attention.spans_at_once(rows, 8, num_kv, 64, HALF, DEVICE, sharing=False)
                assert most_spans(rows, at_once) * 8 * 2 <= workspace.stats.numel()


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_any_list_gives_the_same_rows(at_once):
    """It decides how rows are split and nothing else."""
    assert decode(Heads(14, 2, 64, 64), [1, 300, 0, 1500], at_once=at_once) < TOLERANCE[FP32]


def test_a_workspace_serves_one_pass_after_another():
    heads = Heads(7, 1, 32, 32)
    workspace = decode_workspace(8, heads.num, heads.value_dim, 4096, DEVICE)
    for seed, lengths in enumerate(([900], [260, 0, 3], [140] * 8)):
        assert decode(heads, lengths, seed=seed, workspace=workspace) < TOLERANCE[FP32]


def test_padding_rows_decode_to_zeros():
    heads = Heads(7, 1, 32, 32)
    out = poisoned(2, 7, 32, dtype=FP32)
    decode_attention(
        torch.randn((2, 7, 32), device=DEVICE),
        *torch.randn((2, 2, 1, 32), device=DEVICE),
        pool := poisoned(2, 16, heads.width, dtype=FP32),
        torch.zeros((1, 4), dtype=torch.int32, device=DEVICE),
        torch.zeros(2, dtype=torch.int64, device=DEVICE),
        torch.zeros(2, dtype=torch.int32, device=DEVICE),
        scale=1.0,
        spans=spans_of_rows(np.zeros(2), 4, DEVICE),
        out_BHE=out,
        workspace=decode_workspace(2, 7, 32, 64, DEVICE),
    )
    assert bool(pool.isnan().all())
    assert torch.equal(out.cpu(), torch.zeros(2, 7, 32))


def prefill(heads, pieces, *, seed=0, **options):
    """Relative error of a prefill pass over pieces (start, count), with rows between them that nobody owns."""
    generator = torch.Generator().manual_seed(seed)
    cache = make_cache(heads, [max(start + count, 1) for start, count in pieces], generator)
    offsets, next_row = [], 2
    for _, count in pieces:
        offsets.append(next_row)
        next_row += count + 1
    query = torch.randn((next_row, heads.num, heads.key_dim), generator=generator).to(heads.dtype)
    out = poisoned(next_row, heads.num, heads.value_dim, dtype=heads.dtype)
    as_int32 = {"dtype": torch.int32, "device": DEVICE}
    scale = heads.key_dim**-0.5
    prefill_attention(
        query.to(DEVICE),
        cache.pool_BSW,
        cache.tables,
        slots=torch.arange(len(pieces), **as_int32),
        starts=torch.tensor([start for start, _ in pieces], **as_int32),
        counts=torch.tensor([count for _, count in pieces], **as_int32),
        offsets=torch.tensor(offsets, **as_int32),
        value_dim=heads.value_dim,
        scale=scale,
        out_THE=out,
        **options,
    )
    expected = torch.full(out.shape, float("nan"), dtype=torch.float64)
    for i, ((start, count), offset) in enumerate(zip(pieces, offsets, strict=True)):
        rows = slice(offset, offset + count)
        expected[rows] = attend(query[rows], cache.keys[i], cache.values[i], start, scale=scale, **options)
    owned = ~expected.isnan().any(dim=(1, 2))
    assert bool(out[~owned].isnan().all()), "a row that belongs to no piece was written"
    return relative_error(out[owned.to(DEVICE)], expected[owned])


@pytest.mark.parametrize(
    ("heads", "pieces"),
    [
        (Heads(14, 2, 64, 64), [(0, 1), (0, 16), (15, 17), (100, 3), (0, 0), (64, 64)]),
        (Heads(12, 2, 128, 128, HALF), [(0, 150), (200, 70)]),
        (Heads(7, 1, 32, 32, HALF), [(0, 200), (31, 1)]),
        (Heads(4, 4, 80, 80), [(7, 40)]),
        (Heads(6, 1, 96, 64, HALF, block_size=32), [(0, 90), (300, 20)]),
        (Heads(2, 1, 256, 256, HALF), [(10, 80)]),
    ],
)
def test_prefill_matches_float64(heads, pieces):
    assert prefill(heads, pieces) < TOLERANCE[heads.dtype]


@pytest.mark.parametrize("options", [{"window": 10}, {"window": 100}, {"softcap": 1.5}])
def test_prefill_with_a_window_or_a_soft_cap(options):
    assert prefill(Heads(7, 1, 64, 64), [(0, 130), (250, 33)], **options) < TOLERANCE[FP32]


def test_prefill_of_more_pieces_than_are_looked_at_together():
    pieces = [(i % 3, (0, 1, 7)[i % 3]) for i in range(PIECES_AT_ONCE + 40)]
    assert prefill(Heads(7, 1, 32, 32), [*pieces, (4, 60)]) < TOLERANCE[FP32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32])
def test_rows_are_written_to_their_slots_and_nowhere_else(dtype):
    generator = torch.Generator().manual_seed(0)
    heads = Heads(6, 3, 80, 48, dtype)
    pool = poisoned(5, 16, heads.width, dtype=dtype)
    slots = torch.tensor([17, 79, 33, 32, 0])
    # As attention hands them over: rows are not contiguous.
    key = torch.randn((3, 5, 80), generator=generator).to(dtype).to(DEVICE).transpose(0, 1)
    value = torch.randn((5, 3, 96), generator=generator).to(dtype).to(DEVICE)[:, :, 48:]
    write_rows(pool, slots.to(DEVICE), key, value)
    expected = poisoned(5 * 16, heads.width, dtype=dtype)
    expected[slots.to(DEVICE)] = torch.cat((key.flatten(1), value.flatten(1)), dim=1)
    assert torch.equal(pool.view(-1, heads.width).nan_to_num(7.0), expected.nan_to_num(7.0))
