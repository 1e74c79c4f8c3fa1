"""Rows of a decode pass in pieces: how many there are, where each leaves what it found, and who puts them together.

A row has spans, of what it has for itself, and where it shares a prefix, parts of that. Whoever attends one leaves
the state of a running softmax and arrives at the counter of its row and key-value head. Who is last there joins
them all, spans before parts and each in their order, with products and sums that no compiler may order otherwise: so it
does not matter who is last.

Shape legend: L lines, a line being one query head of one row; C rows of a program; E value head dim.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels import dealing

MIN_SPAN = tl.constexpr(dealing.MIN_SPAN)
PART_STEP = tl.constexpr(128)
"""Key-value rows of which parts are multiples: whole tiles, and enough for a program of its own."""


@triton.jit
def spans_of(past, prefix, num_listed, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The first key-value row that a span reads of a query with so many ``past`` ones, the rows of a span, and the
    number of spans used of those that the pass's list has for the row: all but the last alike, in whole tiles. Of what
    a window leaves spans are no shorter than is worth it."""
    first = tl.maximum(past + 1 - WINDOW, 0) if WINDOW > 0 else prefix
    wanted = num_listed
    if WINDOW > 0:
        wanted = tl.minimum(wanted, tl.maximum((past - first) // MIN_SPAN, 1))
    span_rows = tl.maximum(tl.cdiv(past - first, wanted * TILE), 1) * TILE
    return first, span_rows, tl.maximum(tl.cdiv(past - first, span_rows), 1)


@triton.jit
def parts_of(prefix, num_parts):
    """The rows of a part of a prefix, and the number of parts used."""
    part_rows = tl.cdiv(prefix, num_parts * PART_STEP) * PART_STEP
    return part_rows, tl.cdiv(prefix, tl.maximum(part_rows, 1))


@triton.jit
def leave_state(slot_L, there_L, top_L, total_L, sum_LE, sums, stats, E: tl.constexpr, E_PAD: tl.constexpr):
    """Where ``left_state`` finds it."""
    dims_E = tl.arange(0, E_PAD)
    sum_at = sums + slot_L[:, None] * E + dims_E[None, :]
    tl.store(sum_at, sum_LE, mask=there_L[:, None] & (dims_E < E)[None, :])
    tl.store(stats + slot_L * 2, top_L, mask=there_L)
    tl.store(stats + slot_L * 2 + 1, total_L, mask=there_L)


@triton.jit
def left_state(slot_L, there_L, sums, stats, E: tl.constexpr, E_PAD: tl.constexpr):
    """Maximum, total weight and weighted sum of values over one piece of a row's keys; those of a softmax that has seen
    nothing where it is not there. Another multiprocessor may have written them, so they are not read through
    the cache of this one."""
    dims_E = tl.arange(0, E_PAD)
    top_L = tl.load(stats + slot_L * 2, mask=there_L, other=float("-inf"), cache_modifier=".cg")
    total_L = tl.load(stats + slot_L * 2 + 1, mask=there_L, other=0.0, cache_modifier=".cg")
    sum_at = sums + slot_L[:, None] * E + dims_E[None, :]
    there_LE = there_L[:, None] & (dims_E < E)[None, :]
    return top_L, total_L, tl.load(sum_at, mask=there_LE, other=0.0, cache_modifier=".cg")


@triton.jit
def joined(top_L, total_L, sum_LE, other_top_L, other_total_L, other_sum_LE):
    """The state of a softmax that has seen what both have; one that has seen nothing changes no bit of the other."""
    new_top_L = tl.maximum(top_L, other_top_L)
    # Two that have seen nothing keep weight zero instead of exp2(-inf + inf).
    shift_L = tl.where(new_top_L == float("-inf"), 0.0, new_top_L)
    kept_L, added_L = tl.exp2(top_L - shift_L), tl.exp2(other_top_L - shift_L)
    # Said outright which product is rounded: kernels that join the same states must get the same bits.
    total_L = tl.fma(total_L, kept_L, other_total_L * added_L)
    return new_top_L, total_L, tl.fma(sum_LE, kept_L[:, None], other_sum_LE * added_L[:, None])


@triton.jit
def all_spans(slot_L, used_L, most_used, there_L, H, sums, stats, E: tl.constexpr, E_PAD: tl.constexpr):
    """The state of a softmax that has seen the spans of a row, of which each line has ``used_L``; ``slot_L``: of the
    first, those of the others follow every ``H``."""
    top_L, total_L, sum_LE = left_state(slot_L, there_L, sums, stats, E, E_PAD)
    for span in range(1, most_used):
        left = left_state(slot_L + span * H, there_L & (span < used_L), sums, stats, E, E_PAD)
        top_L, total_L, sum_LE = joined(top_L, total_L, sum_LE, left[0], left[1], left[2])
    return top_L, total_L, sum_LE


@triton.jit
def with_parts(
    top_L, total_L, sum_LE, slot_L, num_used, there_L, sums, stats, E: tl.constexpr, E_PAD: tl.constexpr
):
    """A state joined with those of the parts of a prefix, whose slots follow one another from ``slot_L`` on."""
    for part in range(0, num_used):
        left = left_state(slot_L + part, there_L, sums, stats, E, E_PAD)
        top_L, total_L, sum_LE = joined(top_L, total_L, sum_LE, left[0], left[1], left[2])
    return top_L, total_L, sum_LE


@triton.jit
def is_last(counter, num_arrivals):
    """Whether all others have been here, and what they stored before can be read; the counter is zero again then."""
    # What all threads have stored comes before the arrival of any.
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == num_arrivals - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def are_last(counters_C, there_C, num_arrivals_C):
    """The same at several counters at once, where there is one."""
    tl.debug_barrier()
    last_C = there_C & (tl.atomic_add(counters_C, 1, mask=there_C, sem="acq_rel") == num_arrivals_C - 1)
    tl.store(counters_C, 0, mask=last_C)
    # Each arrived by a thread of its own; now all may read what any of them may.
    tl.debug_barrier()
    return last_C


@triton.jit
def write_lines(out_at_L, there_L, total_L, sum_LE, E: tl.constexpr, E_PAD: tl.constexpr):
    """The weighted means that a state stands for, to where the output of each line begins."""
    dims_E = tl.arange(0, E_PAD)
    # A padding row has seen nothing: its sum is zero and so is what is written.
    made_LE = sum_LE * (1.0 / tl.where(total_L > 0.0, total_L, 1.0))[:, None]
    tl.store(out_at_L[:, None] + dims_E[None, :], made_LE, mask=there_L[:, None] & (dims_E < E)[None, :])
