"""The prefill kernel: runs of query rows, causal over key-value rows that are all in the pool already.

A tile is M rows of (query, head of k) pairs of one piece, heads fastest, so that the G query heads of a
key-value head share its loads and no row is padding when G is not a power of two. Tiles are numbered through all
pieces; program (p, head k) takes the p-th and finds out from the pieces' counts which that is, so that the grid need
only be large enough, whatever pieces there are. Key-value tiles that every query of the tile sees whole are computed
without a mask. With ROTATE queries are turned as they are read.

Shape legend: P pieces looked at together, M query rows of a tile, N key-value rows of a tile, D key head dim, E value
head dim.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.pool import accumulate, load_heads, load_rotated, row_offsets, score

PIECES_AT_ONCE = 128


# As of ``decode_kernel``: where the pieces' arrays begin depends on how many pieces there are.
@triton.jit(
    do_not_specialize=["num_pieces"], do_not_specialize_on_alignment=["slots", "starts", "counts", "offsets"]
)
def prefill_kernel(
    query, cos, sin, pool, tables, slots, starts, counts, offsets, out, num_pieces, scale,
    query_stride_t, query_stride_h, angle_stride, out_stride_t, out_stride_h, table_stride,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    S: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, ROTATE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    piece, earlier = find_tile(counts, num_pieces, tl.program_id(0), G, M, P)
    if piece >= num_pieces:
        return

    num_pairs = tl.load(counts + piece) * G
    # Late tiles see the most key-value rows and start first.
    tile = tl.cdiv(num_pairs, M) - 1 - earlier
    pairs_M = tile * M + tl.arange(0, M)
    real_M = pairs_M < num_pairs
    start = tl.load(starts + piece)
    positions_M = start + pairs_M // G
    rows_M = (tl.load(offsets + piece) + pairs_M // G).to(tl.int64)
    heads_M = head * G + pairs_M % G
    dims_D = tl.arange(0, D_PAD)
    there_MD = real_M[:, None] & (dims_D < D)[None, :]
    angles_M = rows_M * angle_stride
    query_MD = load_rotated(
        query + (rows_M * query_stride_t + heads_M * query_stride_h)[:, None], dims_D[None, :], there_MD,
        cos + angles_M[:, None], sin + angles_M[:, None], D, ROTATE,
    )  # fmt: skip
    table = tables + tl.load(slots + piece).to(tl.int64) * table_stride

    first_position = start + tile * M // G
    last_position = start + (tl.minimum(tile * M + M, num_pairs) - 1) // G
    begin, whole_from = 0, 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // N * N
        whole_from = tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), N) * N
    whole_to = tl.maximum((first_position + 1) // N * N, begin)
    whole_from = tl.minimum(whole_from, whole_to)
    top_M = tl.full([M], float("-inf"), tl.float32)
    total_M = tl.zeros([M], tl.float32)
    sum_ME = tl.zeros([M, E_PAD], tl.float32)
    if WINDOW > 0:
        top_M, total_M, sum_ME = attend_tiles(
            query_MD, pool, table, head, positions_M, begin, whole_from, scale, top_M, total_M, sum_ME,
            True, K, D, D_PAD, E, E_PAD, S, WINDOW, SOFTCAP, EXACT, N,
        )  # fmt: skip
    top_M, total_M, sum_ME = attend_tiles(
        query_MD, pool, table, head, positions_M, whole_from, whole_to, scale, top_M, total_M, sum_ME,
        False, K, D, D_PAD, E, E_PAD, S, WINDOW, SOFTCAP, EXACT, N,
    )  # fmt: skip
    top_M, total_M, sum_ME = attend_tiles(
        query_MD, pool, table, head, positions_M, whole_to, last_position + 1, scale, top_M, total_M, sum_ME,
        True, K, D, D_PAD, E, E_PAD, S, WINDOW, SOFTCAP, EXACT, N,
    )  # fmt: skip

    dims_E = tl.arange(0, E_PAD)
    out_at = out + (rows_M * out_stride_t + heads_M * out_stride_h)[:, None] + dims_E[None, :]
    tl.store(out_at, sum_ME / total_M[:, None], mask=real_M[:, None] & (dims_E < E)[None, :])


@triton.jit
def find_tile(counts, num_pieces, number, G: tl.constexpr, M: tl.constexpr, P: tl.constexpr):
    """The piece that the tile of this number belongs to, and how many tiles of it have lower numbers; a piece
    beyond the last where there are no so many."""
    piece = tl.zeros([], tl.int32)
    num_before = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.int32)
    for first in range(0, num_pieces, P):
        i_P = first + tl.arange(0, P)
        tiles_P = tl.cdiv(tl.load(counts + i_P, mask=i_P < num_pieces, other=0) * G, M)
        passed_P = total + tl.cumsum(tiles_P, 0) <= number
        piece += tl.sum(passed_P.to(tl.int32), 0)
        num_before += tl.sum(tl.where(passed_P, tiles_P, 0), 0)
        total += tl.sum(tiles_P, 0)
    return piece, number - num_before


@triton.jit
def attend_tiles(
    query_MD, pool, table, head, positions_M, begin, end, scale, top_M, total_M, sum_ME,
    MASKED: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The running softmax after the key-value rows of [begin, end)."""
    tokens_N = begin + tl.arange(0, N)
    offsets_N = row_offsets(table, tokens_N, tokens_N < end, S, K * (D + E))
    for _ in range(begin, end, N):
        exists_N = tokens_N < end
        key_ND = load_heads(pool + head * D, offsets_N, exists_N, D, D_PAD)
        value_NE = load_heads(pool + K * D + head * E, offsets_N, exists_N, E, E_PAD)
        scores_MN = score(query_MD, key_ND, scale, SOFTCAP, EXACT)
        if MASKED:
            seen_MN = tokens_N[None, :] <= positions_M[:, None]
            if WINDOW > 0:
                seen_MN &= tokens_N[None, :] > positions_M[:, None] - WINDOW
            scores_MN = tl.where(seen_MN, scores_MN, float("-inf"))
        top_M, total_M, sum_ME = accumulate(scores_MN, value_NE, top_M, total_M, sum_ME, EXACT)
        # One tile ahead, so that the pipeline need not wait for a table before it asks for rows.
        tokens_N += N
        offsets_N = row_offsets(table, tokens_N, tokens_N < end, S, K * (D + E))
    return top_M, total_M, sum_ME
