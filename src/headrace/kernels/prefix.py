"""The prefix of a piece read once for all its members: a kernel that runs beside ``decode_kernel``.

Program (head k and members, part c, piece i) attends the query heads of these members to one part of the key-value
rows they have in common, and leaves the state of a running softmax for each. To a row, that is one more
partial result beside those of its spans; where this one is the last of a row, the row's output is made here.

Shape legend: C members of a piece that a program has, Q query heads of a key-value head, padded to a power of two,
M = C * Q lines of a tile, a line being one query head of one member; D key head dim, E value head dim.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.pool import attend_rows, load_rotated
from headrace.kernels.states import (
    all_spans,
    are_last,
    leave_state,
    parts_of,
    spans_of,
    with_parts,
    write_lines,
)


# As of ``decode_kernel``.
@triton.jit(
    do_not_specialize_on_alignment=["lengths", "firsts", "begins", "members", "starts", "num_pieces"],
)
def prefix_kernel(
    query, cos, sin, pool, tables, slots, lengths, firsts, out, begins, members, starts, num_pieces,
    sums, stats, arrived, span_sums, span_stats, scale,
    query_stride_b, query_stride_h, angle_stride, out_stride_b, out_stride_h, table_stride,
    K: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, S: tl.constexpr,
    SOFTCAP: tl.constexpr, EXACT: tl.constexpr, TILE: tl.constexpr,
    ROTATE: tl.constexpr, SPAN_STEP: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = M // Q
    head, part, num_parts = tl.program_id(0) % K, tl.program_id(1), tl.num_programs(1)
    first_member = tl.program_id(0) // K * C
    members_C, lines_M = first_member + tl.arange(0, C), tl.arange(0, M)
    members_M, heads_M = first_member + lines_M // Q, head * G + lines_M % Q
    dims_D = tl.arange(0, D_PAD)
    for piece in range(tl.program_id(2), tl.load(num_pieces), tl.num_programs(2)):
        first = tl.load(starts + piece)
        num_members = tl.load(starts + piece + 1) - first
        # All members have the same rows here, so any of their tables will do.
        leader = tl.load(members + first)
        table = tables + tl.load(slots + leader).to(tl.int64) * table_stride
        prefix = tl.load(begins + leader)
        part_rows, num_used_parts = parts_of(prefix, num_parts)
        begin = part * part_rows
        end = tl.where(first_member < num_members, tl.minimum(begin + part_rows, prefix), begin)
        there_M = (members_M < num_members) & (lines_M % Q < G) & (begin < end)
        rows_M = tl.load(members + first + members_M, mask=there_M, other=0)

        there_MD = there_M[:, None] & (dims_D < D)[None, :]
        angles_M = rows_M * angle_stride
        query_MD = load_rotated(
            query + (rows_M * query_stride_b + heads_M * query_stride_h)[:, None], dims_D[None, :], there_MD,
            cos + angles_M[:, None], sin + angles_M[:, None], D, ROTATE,
        )  # fmt: skip
        top_M = tl.full([M], float("-inf"), tl.float32)
        total_M = tl.zeros([M], tl.float32)
        sum_ME = tl.zeros([M, E_PAD], tl.float32)
        top_M, total_M, sum_ME = attend_rows(
            query_MD, pool, table, head, begin, end, top_M, total_M, sum_ME, scale,
            K, D, D_PAD, E, E_PAD, S, SOFTCAP, EXACT, TILE,
        )  # fmt: skip

        part_slot_M = (rows_M * (K * G) + heads_M) * num_parts
        leave_state(part_slot_M + part, there_M, top_M, total_M, sum_ME, sums, stats, E, E_PAD)
        there_C = (members_C < num_members) & (begin < end)
        rows_C = tl.load(members + first + members_C, mask=there_C, other=0)
        past_C = tl.load(lengths + rows_C, mask=there_C, other=1) - 1
        first_C = tl.load(firsts + rows_C, mask=there_C, other=0)
        num_listed_C = tl.load(firsts + rows_C + 1, mask=there_C, other=1) - first_C
        used_C = spans_of(past_C, prefix, num_listed_C, 0, SPAN_STEP)[2]
        last_C = are_last(arrived + rows_C * K + head, there_C, used_C + num_used_parts)
        # Spans of the rows that are finished here; none of the others.
        used_C = tl.where(last_C, used_C, 0)
        if tl.max(used_C) > 0:
            used_M = tl.reshape(tl.broadcast_to(used_C[:, None], [C, Q]), [M])
            last_M = there_M & (used_M > 0)
            slot_M = tl.load(firsts + rows_M, mask=last_M, other=0) * (K * G) + heads_M
            top_M, total_M, sum_ME = all_spans(
                slot_M, used_M, tl.max(used_C), last_M, K * G, span_sums, span_stats, E, E_PAD
            )
            top_M, total_M, sum_ME = with_parts(
                top_M, total_M, sum_ME, part_slot_M, num_used_parts, last_M, sums, stats, E, E_PAD
            )
            out_at_M = out + rows_M * out_stride_b + heads_M * out_stride_h
            write_lines(out_at_M, last_M, total_M, sum_ME, E, E_PAD)
