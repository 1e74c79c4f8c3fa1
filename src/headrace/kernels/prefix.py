"""The prefix of a piece read once for all its members: the first of two kernels of a decode pass with sharing.

Program (head k, part c, piece i) attends the query heads of all members of a piece to one part of the
key-value rows they have in common, and leaves the state of a running softmax for each. ``decode_kernel`` then
goes on from these states with what a row has for itself.

Shape legend: M lines of a tile, a line being one query head of one member; P query heads of a key-value head,
padded; D key head dim, E value head dim.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.pool import attend_rows

PART_STEP = tl.constexpr(128)
"""Key-value rows of which parts are multiples: whole tiles, and enough for a program of its own."""


@triton.jit
def rows_of_part(prefix, num_parts):
    """Key-value rows of a part, when there may be so many parts."""
    return tl.cdiv(prefix, num_parts * PART_STEP) * PART_STEP


@triton.jit
def prefix_kernel(
    query,
    pool,
    tables,
    table_rows,
    begins,
    members,
    starts,
    num_pieces,
    sums,
    stats,
    scale,
    query_stride_b,
    query_stride_h,
    table_stride,
    K: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    S: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
    TILE: tl.constexpr,
):
    head, part, num_parts = tl.program_id(0) % K, tl.program_id(1), tl.num_programs(1)
    first_line = tl.program_id(0) // K * M
    lines_M = first_line + tl.arange(0, M)
    heads_M = head * G + lines_M % G
    dims_D, dims_E = tl.arange(0, D_PAD), tl.arange(0, E_PAD)
    for piece in range(tl.program_id(2), tl.load(num_pieces), tl.num_programs(2)):
        first = tl.load(starts + piece)
        num_lines = (tl.load(starts + piece + 1) - first) * G
        rows_M = tl.load(members + first + lines_M // G, mask=lines_M < num_lines, other=0)
        # All members have the same rows here, so any of their tables will do.
        leader = tl.load(members + first)
        table = tables + tl.load(table_rows + leader).to(tl.int64) * table_stride
        prefix = tl.load(begins + leader)
        part_rows = rows_of_part(prefix, num_parts)
        begin = part * part_rows
        end = tl.where(first_line < num_lines, tl.minimum(begin + part_rows, prefix), begin)
        there_M = (lines_M < num_lines) & (begin < end)

        query_at = query + (rows_M * query_stride_b + heads_M * query_stride_h)[:, None] + dims_D[None, :]
        query_MD = tl.load(query_at, mask=there_M[:, None] & (dims_D < D)[None, :], other=0.0)
        top_M = tl.full([M], float("-inf"), tl.float32)
        total_M = tl.zeros([M], tl.float32)
        sum_ME = tl.zeros([M, E_PAD], tl.float32)
        top_M, total_M, sum_ME = attend_rows(
            query_MD, pool, table, head, begin, end, top_M, total_M, sum_ME, scale,
            K, D, D_PAD, E, E_PAD, S, SOFTCAP, EXACT, TILE,
        )  # fmt: skip

        state_M = (rows_M * (K * G) + heads_M) * num_parts + part
        written_ME = there_M[:, None] & (dims_E < E)[None, :]
        tl.store(sums + state_M[:, None] * E + dims_E[None, :], sum_ME, mask=written_ME)
        tl.store(stats + state_M * 2, top_M, mask=there_M)
        tl.store(stats + state_M * 2 + 1, total_M, mask=there_M)


@triton.jit
def part_state(part, num_parts, line_P, there_P, sums, stats, E: tl.constexpr, E_PAD: tl.constexpr):
    """Maximum, total weight and weighted sum of values over one part of a row's keys; those of a softmax that has seen
    nothing where it is not there. ``line_P``: row of the pass * H + query head. Another multiprocessor may have written
    them, so they are not read through the cache of this one."""
    dims_E = tl.arange(0, E_PAD)
    state_P = line_P * num_parts + part
    top_P = tl.load(stats + state_P * 2, mask=there_P, other=float("-inf"), cache_modifier=".cg")
    total_P = tl.load(stats + state_P * 2 + 1, mask=there_P, other=0.0, cache_modifier=".cg")
    sum_at = sums + state_P[:, None] * E + dims_E[None, :]
    there_PE = there_P[:, None] & (dims_E < E)[None, :]
    return top_P, total_P, tl.load(sum_at, mask=there_PE, other=0.0, cache_modifier=".cg")


@triton.jit
def joined(top_P, total_P, sum_PE, other_top_P, other_total_P, other_sum_PE):
    """The state of a softmax that has seen what both have."""
    new_top_P = tl.maximum(top_P, other_top_P)
    # Two that have seen nothing keep weight zero instead of exp2(-inf + inf).
    shift_P = tl.where(new_top_P == float("-inf"), 0.0, new_top_P)
    kept_P, added_P = tl.exp2(top_P - shift_P), tl.exp2(other_top_P - shift_P)
    total_P = total_P * kept_P + other_total_P * added_P
    return new_top_P, total_P, sum_PE * kept_P[:, None] + other_sum_PE * added_P[:, None]
