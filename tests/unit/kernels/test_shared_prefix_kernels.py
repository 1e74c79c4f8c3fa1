"""Decode attention that reads shared prefixes once, against float64, with NaN in every row nobody may read."""

from __future__ import annotations

from dataclasses import replace

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
    share_prefix,
    take_last,
)

require_kernels()

from headrace.kernels import decode_attention as module  # noqa: E402
from headrace.kernels.chip import Chip  # noqa: E402
from headrace.kernels.dealing import spans_of_rows  # noqa: E402
from headrace.kernels.decode_attention import decode_attention, decode_workspace  # noqa: E402
from headrace.kernels.decode_shapes import PrefixShape, prefix_shape  # noqa: E402
from headrace.kernels.shared_prefixes import SharedPrefixes  # noqa: E402

FP32 = torch.float32


def shared_prefixes(num_rows, pieces):
    """``pieces``: pairs of rows of the pass and of the length of their prefix."""
    begins = torch.zeros(num_rows, dtype=torch.int32)
    members = torch.full((num_rows,), num_rows, dtype=torch.int32)
    starts = torch.zeros(num_rows // 2 + 1, dtype=torch.int32)
    at = 0
    for i, (rows, prefix) in enumerate(pieces):
        begins[rows] = prefix
        members[at : at + len(rows)] = torch.tensor(rows, dtype=torch.int32)
        at += len(rows)
        starts[i + 1] = at
    num_pieces = torch.tensor([len(pieces)], dtype=torch.int32)
    return SharedPrefixes(*(tensor.to(DEVICE) for tensor in (begins, members, starts, num_pieces)))


def decode(heads, lengths, pieces, **options):
    """Relative error of a pass."""
    return relative_error(*outputs(heads, lengths, pieces, **options))


def outputs(heads, lengths, pieces, *, seed=0, workspace=None, at_once=24, **options):
    """What a pass over sequences of these lengths (0: a padding row) returns, dealt out to so many spans, and what it
    should, where each piece (sequences, prefix) shares a prefix. Rows come in a random order."""
    generator = torch.Generator().manual_seed(seed)
    cache = make_cache(heads, [max(length, 1) for length in lengths], generator)
    if not options.get("window"):
        for sequences, prefix in pieces:
            share_prefix(cache, heads, sequences, prefix)
    order = torch.randperm(len(lengths), generator=generator)
    row_of = torch.argsort(order).tolist()
    query = torch.randn((len(lengths), heads.num, heads.key_dim), generator=generator).to(heads.dtype)
    out = torch.full(
        (len(lengths), heads.num, heads.value_dim), float("nan"), dtype=heads.dtype, device=DEVICE
    )
    workspace = workspace or decode_workspace(len(lengths), heads.num, heads.value_dim, max(lengths), DEVICE)
    scale = heads.key_dim**-0.5
    whole = cache.pool_BSW.clone()
    key, value = take_last(cache, heads, lengths)
    begins = np.zeros(len(lengths), dtype=np.int64)
    for sequences, prefix in pieces:
        begins[sequences] = prefix
    decode_attention(
        query.to(DEVICE),
        key[order.to(DEVICE)],
        value[order.to(DEVICE)],
        cache.pool_BSW,
        cache.tables,
        order.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32)[order].to(DEVICE),
        scale=scale,
        spans=spans_of_rows((np.array(lengths) - begins)[order.numpy()], at_once, DEVICE),
        shared=shared_prefixes(len(lengths), [([row_of[s] for s in piece], n) for piece, n in pieces]),
        out_BHE=out,
        workspace=workspace,
        **options,
    )
    assert torch.equal(cache.pool_BSW.nan_to_num(7.0), whole.nan_to_num(7.0)), (
        "keys and values in their places"
    )
    assert not workspace.arrived.any(), "counters are zero between passes"
    expected = torch.zeros(out.shape, dtype=torch.float64)
    for row, sequence in enumerate(order.tolist()):
        if length := lengths[sequence]:
            key, value = cache.keys[sequence], cache.values[sequence]
            expected[row] = attend(query[row : row + 1], key, value, length - 1, scale=scale, **options)[0]
    return out, expected


SPANS_AND_PARTS = (
    pytest.param(
        Heads(7, 1, 32, 32),
        [1000, 385, 931, 70, 0, 800],
        [([0, 1, 2], 384)],
        id="several spans and several parts",
    ),
    pytest.param(
        Heads(40, 1, 16, 16), [50, 49, 61], [([0, 1, 2], 48)], id="more heads a row than a tile has lines"
    ),
)


@pytest.mark.parametrize(
    ("heads", "lengths", "pieces"),
    [
        pytest.param(
            Heads(14, 2, 64, 64),
            [49, 70, 300, 0, 33, 17, 40, 0, 90],
            [([0, 1, 2], 48), ([4, 6], 16)],
            id="different lengths, with rows of no piece and padding",
        ),
        pytest.param(
            Heads(28, 4, 128, 128, HALF), [113 + 9 * i for i in range(8)], [(list(range(8)), 112)], id="a full piece"
        ),
        pytest.param(
            Heads(7, 1, 64, 64, HALF),
            [200 + i for i in range(19)],
            [(list(range(8)), 192), (list(range(8, 16)), 192), ([16, 17, 18], 192)],
            id="a group of 19",
        ),
        pytest.param(
            Heads(4, 4, 128, 128),
            [81, 95, 100, 129],
            [([0, 1], 80), ([2, 3], 96)],
            id="one query head a key-value head",
        ),
        pytest.param(
            Heads(7, 1, 32, 32), [1000, 901, 931, 70], [([0, 1, 2], 896)], id="a long prefix in several parts"
        ),
        pytest.param(Heads(24, 2, 128, 128, HALF), [70, 75, 40], [([0, 1], 64)], id="twelve query heads a head"),
        pytest.param(Heads(32, 1, 64, 64, HALF), [70, 300], [([0, 1], 64)], id="thirty-two of them"),
        pytest.param(Heads(32, 2, 16, 16), [40] * 8, [(list(range(8)), 32)], id="more lines than a tile has"),
        pytest.param(
            Heads(6, 1, 96, 64, HALF, block_size=32), [65, 400, 72], [([0, 2, 1], 64)], id="unequal head dims"
        ),
        pytest.param(
            Heads(2, 1, 16, 16),
            [17 + i for i in range(18)],
            [([2 * i, 2 * i + 1], 16) for i in range(9)],
            id="many small pieces",
        ),
        pytest.param(Heads(7, 1, 32, 32), [20, 300], [], id="no piece at all"),
        *SPANS_AND_PARTS,
    ],
)  # fmt: skip
def test_rows_with_a_shared_prefix_match_float64(heads, lengths, pieces):
    assert decode(heads, lengths, pieces) < TOLERANCE[heads.dtype]


@pytest.mark.parametrize(
    ("heads", "lengths", "pieces"),
    [
        *SPANS_AND_PARTS,
        pytest.param(
            Heads(12, 2, 64, 64, HALF), [60 + i for i in range(9)], [(list(range(8)), 48)], id="one span and one part"
        ),
        pytest.param(
            Heads(32, 2, 16, 16), [40] * 13, [(list(range(8)), 32), (list(range(8, 12)), 16)],
            id="more lines than a tile has",
        ),
    ],
)  # fmt: skip
def test_it_does_not_matter_who_is_last_with_a_row(monkeypatch, heads, lengths, pieces):
    """Programs on a GPU end in any order; here either kernel is the last with every row."""
    agree_in_either_order(monkeypatch, heads, lengths, pieces)


@pytest.mark.parametrize(
    ("heads", "lengths", "at_once"),
    [
        pytest.param(Heads(4, 2, 32, 32), [3064, 1064], 6, id="a share of several heads"),
        pytest.param(Heads(2, 1, 32, 32), [3064, 65, 65, 65, 65], 10, id="one row that is far longer"),
        pytest.param(Heads(2, 1, 80, 80, HALF), [65, 1089], 24, id="spans of other tiles than the prefix's"),
        pytest.param(Heads(2, 1, 80, 80, HALF), [65, 4161], 24, id="fewer spans used than listed"),
    ],
)
def test_both_kernels_know_how_many_spans_a_row_has(monkeypatch, heads, lengths, at_once):
    """Rows are dealt out to few spans here, so that they are longer than the shortest."""
    pieces = [(list(range(len(lengths))), 64)]
    agree_in_either_order(monkeypatch, heads, lengths, pieces, at_once=at_once)


def agree_in_either_order(monkeypatch, heads, lengths, pieces, **options):
    finished_by_own, expected = outputs(heads, lengths, pieces, **options)
    order = []

    def other_way_round(attend_prefixes, attend_own, _side):
        for launch in (attend_own, attend_prefixes):
            launch()
            order.append(launch)

    monkeypatch.setattr(module, "_side_by_side", other_way_round)
    finished_by_prefixes, _ = outputs(heads, lengths, pieces, **options)
    assert len(order) == 2
    assert relative_error(finished_by_own, expected) < TOLERANCE[heads.dtype]
    assert torch.equal(finished_by_own, finished_by_prefixes)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(PrefixShape(16, 16, 4, 2), id="smaller"),
        pytest.param(PrefixShape(64, 32, 4, 2, most_registers=168), id="fewer registers"),
        pytest.param(PrefixShape(16, 32, 4, 2, num_at_once=1), id="fewer than pieces"),
    ],
)
def test_programs_of_prefixes_of_any_size_and_number(monkeypatch, shape):
    monkeypatch.setattr(module, "prefix_shape", lambda *_, **__: shape)
    monkeypatch.setattr(module, "chip", lambda _: Chip(0, 2))
    pieces = [([2 * i, 2 * i + 1], 16 + 16 * i) for i in range(9)]
    assert decode(Heads(24, 2, 16, 16, HALF), [200 + i for i in range(18)], pieces) < TOLERANCE[HALF]


@pytest.mark.parametrize(("num_rows", "is_beside"), [(64, True), (63, False), (2, False)])
def test_prefixes_of_few_rows_are_read_by_themselves(monkeypatch, num_rows, is_beside):
    """On the same stream, with as many programs as there are pieces."""
    told = []

    def looked_at(attend_prefixes, _attend_own, side):
        (shape,) = [given for given in attend_prefixes.args if isinstance(given, PrefixShape)]
        told.append((side, shape.num_at_once))

    monkeypatch.setattr(module, "_side_by_side", looked_at)
    rows = {"dtype": HALF, "device": DEVICE}
    decode_attention(
        torch.zeros((num_rows, 2, 16), **rows),
        *torch.zeros((2, num_rows, 1, 16), **rows),
        torch.zeros((4, 16, 32), **rows),
        torch.ones((num_rows, 3), dtype=torch.int32, device=DEVICE),
        torch.arange(num_rows, device=DEVICE),
        torch.full((num_rows,), 40, dtype=torch.int32, device=DEVICE),
        scale=1.0,
        spans=spans_of_rows(np.full(num_rows, 8), 24, DEVICE),
        shared=shared_prefixes(num_rows, [([0, 1], 32)]),
        out_BHE=torch.zeros((num_rows, 2, 16), **rows),
        workspace=replace(decode_workspace(num_rows, 2, 16, 8192, DEVICE), side="at its side"),
    )
    assert told == [("at its side", 1) if is_beside else (None, None)]


def test_programs_of_prefixes_leave_room_for_others_where_there_are_some():
    assert prefix_shape(128, HALF, is_alone=True).num_at_once is None
    assert prefix_shape(128, HALF, is_alone=False).num_at_once == 1


def test_a_soft_cap_holds_for_prefixes_too():
    assert decode(Heads(7, 1, 64, 64), [50, 61, 70], [([0, 1, 2], 48)], softcap=1.5) < TOLERANCE[FP32]


def test_a_layer_with_a_window_reads_every_row_for_itself():
    assert decode(Heads(7, 1, 32, 32), [50, 61, 70], [([0, 1, 2], 48)], window=20) < TOLERANCE[FP32]


def test_a_workspace_serves_one_pass_after_another():
    heads = Heads(7, 1, 32, 32)
    workspace = decode_workspace(8, heads.num, heads.value_dim, 1024, DEVICE)
    passes = (
        ([420, 400], [([0, 1], 384)]),
        ([33, 0, 400, 60], [([0, 3], 32)]),
        ([50] * 8, [([0, 1, 2], 48), ([3, 4, 5, 6, 7], 32)]),
        ([300], []),
    )
    for seed, (lengths, pieces) in enumerate(passes):
        assert decode(heads, lengths, pieces, seed=seed, workspace=workspace) < TOLERANCE[FP32]
