"""The decode kernel: one query row a sequence against all its key-value rows, split over the chip.

Program (head k, entry n) attends the G query heads of key-value head k to one span of the key-value rows that a row of
the pass sees: the one that the pass's list of spans has there (``dealing``). With ROTATE queries and the row's own key
are turned as they are read; what is in the pool has been.
The row's own key and value, which are not in the pool yet, are the business of its last span: that puts them there and
counts them in without reading them back. A short row is one span, written straight to the output. Otherwise each span
leaves a partial result, and the program that is last to do so makes the output of all of them. With SHARED a row's
spans begin behind its shared prefix, whose parts are further partial results: ``prefix_kernel`` leaves them, and may be
the last itself.

Shape legend: G query heads of a key-value head, P the same padded to a power of two, N key-value rows of a
tile, D key head dim, E value head dim.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.pool import attend_few, load_rotated, scaled
from headrace.kernels.states import (
    all_spans,
    is_last,
    leave_state,
    parts_of,
    spans_of,
    with_parts,
    write_lines,
)


# A number that is one, or a multiple of sixteen, would otherwise be a kernel of its own, and so would arrays that begin
# where no sixteen bytes do.
@triton.jit(
    do_not_specialize=["num_parts"],
    do_not_specialize_on_alignment=["lengths", "span_rows", "firsts", "begins"],
)
def decode_kernel(
    query, key, value, cos, sin, pool, tables, slots, lengths, span_rows, firsts, out,
    partial_sums, partial_stats, arrived, begins, prefix_sums, prefix_stats, num_parts, scale,
    query_stride_b, query_stride_h, key_stride_b, key_stride_k, value_stride_b, value_stride_k,
    angle_stride, out_stride_b, out_stride_h, table_stride,
    K: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, S: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, SHARED: tl.constexpr,
    ROTATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head, entry = tl.program_id(0), tl.program_id(1)
    row = tl.load(span_rows + entry)
    if row < 0:
        return
    first_entry = tl.load(firsts + row)
    span, num_listed = entry - first_entry, tl.load(firsts + row + 1) - first_entry
    length = tl.load(lengths + row)
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride
    prefix, past = tl.load(begins + row) if SHARED else length * 0, tl.maximum(length - 1, 0)
    first, rows_each, num_used = spans_of(past, prefix, num_listed, WINDOW, TILE)
    if span >= num_used:
        return

    heads_P, dims_D, dims_E = tl.arange(0, P), tl.arange(0, D_PAD), tl.arange(0, E_PAD)
    real_P = heads_P < G
    real_D = dims_D < D
    cos += row * angle_stride
    sin += row * angle_stride
    real_PD = real_P[:, None] & real_D[None, :]
    same_P1 = tl.zeros([P, 1], tl.int32)
    query_PD = load_rotated(
        query + row * query_stride_b + (head * G + heads_P)[:, None] * query_stride_h, dims_D[None, :], real_PD,
        cos + same_P1, sin + same_P1, D, ROTATE,
    )  # fmt: skip
    begin = first + span * rows_each
    end = tl.minimum(begin + rows_each, past)
    has_own = (span == num_used - 1) & (length > 0)
    key_at = key + row * key_stride_b + head * key_stride_k
    value_at = value + row * value_stride_b + head * value_stride_k
    key_D = load_rotated(key_at, dims_D, has_own & real_D, cos, sin, D, ROTATE)
    value_E = tl.load(value_at + dims_E, mask=has_own & (dims_E < E), other=0.0)
    # Asked for here and used behind the loop, which hides the wait.
    own_block = tl.load(table + past // S, mask=has_own, other=0).to(tl.int64)
    top_P, total_P, sum_EP = seen_own_row(query_PD, key_D, value_E, has_own, scale, SOFTCAP)
    top_P, total_P, sum_EP = attend_few(
        tl.trans(query_PD), pool, table, head, begin, end, top_P, total_P, sum_EP, scale,
        K, D, D_PAD, E, E_PAD, S, SOFTCAP, EXACT, TILE, WINDOW == 0,
    )  # fmt: skip
    sum_PE = tl.trans(sum_EP)
    place = pool + (own_block * S + past % S) * (K * (D + E))
    tl.store(place + head * D + dims_D, key_D, mask=has_own & real_D)
    tl.store(place + K * D + head * E + dims_E, value_E, mask=has_own & (dims_E < E))

    out_at_P = out + row * out_stride_b + (head * G + heads_P) * out_stride_h
    num_used_parts = parts_of(prefix, num_parts)[1] if SHARED else 0
    if num_used + num_used_parts == 1:
        write_lines(out_at_P, real_P, total_P, sum_PE, E, E_PAD)
        return
    slot_P = entry * (K * G) + head * G + heads_P
    leave_state(slot_P, real_P, top_P, total_P, sum_PE, partial_sums, partial_stats, E, E_PAD)
    if not is_last(arrived + row * K + head, num_used + num_used_parts):
        return
    # Its own is read back too: the threads of a matrix product have other numbers than those that read a state.
    slot_P = first_entry * (K * G) + head * G + heads_P
    top_P, total_P, sum_PE = all_spans(
        slot_P, num_used, num_used, real_P, K * G, partial_sums, partial_stats, E, E_PAD
    )
    if SHARED:
        slot_P = (row * (K * G) + head * G + heads_P) * num_parts
        top_P, total_P, sum_PE = with_parts(
            top_P, total_P, sum_PE, slot_P, num_used_parts, real_P, prefix_sums, prefix_stats, E, E_PAD
        )
    write_lines(out_at_P, real_P, total_P, sum_PE, E, E_PAD)


@triton.jit
def seen_own_row(query_PD, key_D, value_E, has_own, scale, SOFTCAP: tl.constexpr):
    """A running softmax that has seen a row's own key and value, where they are this program's business, or nothing."""
    raw_P = tl.sum(query_PD.to(tl.float32) * key_D[None, :].to(tl.float32), axis=1)
    top_P = tl.where(has_own, scaled(raw_P, scale, SOFTCAP), float("-inf"))
    total_P = tl.zeros_like(top_P) + tl.where(has_own, 1.0, 0.0)
    # Zeros where it is not: then the value was not loaded.
    return top_P, total_P, value_E.to(tl.float32)[:, None] + tl.zeros_like(top_P)[None, :]
