"""What the attention kernels share: reading key-value rows through a block table, and scoring them.

A pool is [blocks, S, W]; a row of it holds the K keys of a token (K x D), then its K values (K x E).

Shape legend: N key-value rows of a tile, M query rows of a tile, P query heads of one row, padded,
D key or value head dim, E value head dim.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

MIN_DIM = 16
"""Matrix products in a kernel want at least so many terms."""
LOG2_E = tl.constexpr(1.4426950408889634)


def padded_dim(head_dim: int) -> int:
    """The width a kernel computes a head of this width in."""
    padded: int = max(triton.next_power_of_2(head_dim), MIN_DIM)
    return padded


@triton.jit
def row_offsets(table, tokens_N, visible_N, S: tl.constexpr, W: tl.constexpr):
    """int64 [N], where in the pool the rows of these tokens begin."""
    blocks_N = tl.load(table + tokens_N // S, mask=visible_N, other=0).to(tl.int64)
    return (blocks_N * S + tokens_N % S) * W


@triton.jit
def block_place(pool, table, token, end, S: tl.constexpr, W: tl.constexpr):
    """Where the block of this token begins; behind the ``end`` any block."""
    return pool + tl.load(table + token // S, mask=token < end, other=0).to(tl.int64) * (S * W)


@triton.jit
def load_heads(pointer, offsets_N, visible_N, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[N, PADDED], one head of each row; zero where a row is not visible, whatever memory holds there."""
    dims_D = tl.arange(0, PADDED)
    pointers_ND = pointer + offsets_N[:, None] + dims_D[None, :]
    if DIM == PADDED:
        tile_ND = tl.load(pointers_ND, mask=visible_N[:, None], other=0.0)
    else:
        tile_ND = tl.load(pointers_ND, mask=visible_N[:, None] & (dims_D < DIM)[None, :], other=0.0)
    return tile_ND


@triton.jit
def load_columns(pointer, offsets_N, visible_N, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[PADDED, N], the same with a row a column."""
    dims_D = tl.arange(0, PADDED)
    pointers_DN = pointer + offsets_N[None, :] + dims_D[:, None]
    if DIM == PADDED:
        tile_DN = tl.load(pointers_DN, mask=visible_N[None, :], other=0.0)
    else:
        tile_DN = tl.load(pointers_DN, mask=visible_N[None, :] & (dims_D < DIM)[:, None], other=0.0)
    return tile_DN


@triton.jit
def load_rotated(row, dims, there, cos, sin, D: tl.constexpr, ROTATE: tl.constexpr):
    """Heads that begin at ``row``, zero where they are not ``there``, with ROTATE turned by the angles whose cosines
    and sines begin at ``cos`` and ``sin``: each number together with the one half a head away. All are read in one
    shape, hence in one layout, so that nothing is moved between threads."""
    x = tl.load(row + dims, mask=there, other=0.0)
    if ROTATE:
        # A remainder, not a choice: compilers know which of these numbers follow one another, and load them together.
        y = tl.load(row + (dims + D // 2) % D, mask=there, other=0.0).to(tl.float32)
        cosines = tl.load(cos + dims, mask=there, other=0.0).to(tl.float32)
        sines = tl.load(sin + dims, mask=there, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * cosines + y * tl.where(dims < D // 2, -sines, sines)).to(x.dtype)
    return x


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    """A matrix product that rounds float32 operands to nothing less when EXACT."""
    return tl.dot(a, b, input_precision="ieee") if EXACT else tl.dot(a, b)


@triton.jit
def score(query_MD, key_ND, scale, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """[M, N], in units of log2, so that a weight is ``exp2`` of it."""
    return scaled(product(query_MD, tl.trans(key_ND), EXACT), scale, SOFTCAP)


@triton.jit
def scaled(raw, scale, SOFTCAP: tl.constexpr):
    """Products of queries and keys as scores."""
    if SOFTCAP > 0.0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which saturates rightly when exp overflows.
        grown = tl.exp2(raw * (scale * (2.0 / SOFTCAP) * LOG2_E))
        scores = (1.0 - 2.0 / (grown + 1.0)) * (SOFTCAP * LOG2_E)
    else:
        scores = raw * (scale * LOG2_E)
    return scores


@triton.jit
def accumulate(scores_MN, value_NE, top_M, total_M, sum_ME, EXACT: tl.constexpr):
    """One step of a running softmax: returns the new maximum, total weight and weighted sum of values."""
    new_top_M = tl.maximum(top_M, tl.max(scores_MN, axis=1))
    # A row that has seen nothing yet keeps weight zero instead of exp2(-inf + inf).
    shift_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
    weights_MN = tl.exp2(scores_MN - shift_M[:, None])
    rescale_M = tl.exp2(top_M - shift_M)
    total_M = total_M * rescale_M + tl.sum(weights_MN, axis=1)
    sum_ME = sum_ME * rescale_M[:, None] + product(weights_MN.to(value_NE.dtype), value_NE, EXACT)
    return new_top_M, total_M, sum_ME


@triton.jit
def attend_rows(
    query_MD,
    pool,
    table,
    head,
    begin,
    end,
    top_M,
    total_M,
    sum_ME,
    scale,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    S: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
    TILE: tl.constexpr,
):
    """A running softmax taken on over rows [begin, end) of a table, all of which all queries see."""
    tokens_N = begin + tl.arange(0, TILE)
    offsets_N = row_offsets(table, tokens_N, tokens_N < end, S, K * (D + E))
    for _ in range(begin, end, TILE):
        visible_N = tokens_N < end
        key_ND = load_heads(pool + head * D, offsets_N, visible_N, D, D_PAD)
        value_NE = load_heads(pool + K * D + head * E, offsets_N, visible_N, E, E_PAD)
        scores_MN = score(query_MD, key_ND, scale, SOFTCAP, EXACT)
        scores_MN = tl.where(visible_N[None, :], scores_MN, float("-inf"))
        top_M, total_M, sum_ME = accumulate(scores_MN, value_NE, top_M, total_M, sum_ME, EXACT)
        # One tile ahead, so that the pipeline need not wait for a table before it asks for rows.
        tokens_N += TILE
        offsets_N = row_offsets(table, tokens_N, tokens_N < end, S, K * (D + E))
    return top_M, total_M, sum_ME


@triton.jit
def attend_few(
    query_DP, pool, table, head, begin, end, top_P, total_P, sum_EP, scale,
    K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, S: tl.constexpr,
    SOFTCAP: tl.constexpr, EXACT: tl.constexpr, TILE: tl.constexpr, IN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """As ``attend_rows``, for the few queries of one row. Keys and values are the left operands of the products, whose
    tiles may not be narrower than 16, and queries the right ones, of which 8 will do: less is computed for queries
    that are not there. With IN_BLOCKS ``begin`` is where a block does, and a tile that is a block is looked up once,
    not row by row."""
    W: tl.constexpr = K * (D + E)
    A_BLOCK: tl.constexpr = IN_BLOCKS and TILE == S
    tokens_N = begin + tl.arange(0, TILE)
    if A_BLOCK:
        place, offsets_N = block_place(pool, table, begin, end, S, W), tl.arange(0, TILE) * W
    else:
        place, offsets_N = pool, row_offsets(table, tokens_N, tokens_N < end, S, W)
    for start in range(begin, end, TILE):
        visible_N = tokens_N < end
        # A block is there to its end, and what lies behind the last key is not among the scores.
        key_ND = load_heads(place + head * D, offsets_N, A_BLOCK | visible_N, D, D_PAD)
        value_EN = load_columns(place + K * D + head * E, offsets_N, visible_N, E, E_PAD)
        scores_NP = scaled(product(key_ND, query_DP, EXACT), scale, SOFTCAP)
        scores_NP = tl.where(visible_N[:, None], scores_NP, float("-inf"))
        new_top_P = tl.maximum(top_P, tl.max(scores_NP, axis=0))
        # As in ``accumulate``.
        shift_P = tl.where(new_top_P == float("-inf"), 0.0, new_top_P)
        weights_NP = tl.exp2(scores_NP - shift_P[None, :])
        rescale_P = tl.exp2(top_P - shift_P)
        total_P = total_P * rescale_P + tl.sum(weights_NP, axis=0)
        sum_EP = sum_EP * rescale_P[None, :] + product(value_EN, weights_NP.to(value_EN.dtype), EXACT)
        top_P = new_top_P
        # One tile ahead, so that the pipeline need not wait for a table before it asks for rows.
        tokens_N += TILE
        if A_BLOCK:
            place = block_place(pool, table, start + TILE, end, S, W)
        else:
            offsets_N = row_offsets(table, tokens_N, tokens_N < end, S, W)
    return top_P, total_P, sum_EP
