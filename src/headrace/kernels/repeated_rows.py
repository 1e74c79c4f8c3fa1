"""Rows of keys and values that are read in several places: laid out as they are read, and gradients brought back.

In: dense keys and values and the row of each place; or gradients of the places, and the places of each row. Out: a
copy of each row at all its places; or for each row the sum of its places, taken in float32 in their order, so
that it is the same every time. Keys and values go through one launch together, several rows to a program: a row
of a few hundred bytes alone is too little to hide what reading its index takes.

Shape legend: T rows, R places, W elements of a row, B rows or places of a program.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

_USUAL_WARPS, _MAX_WARPS = 4, 16
_MAX_ROWS = 16
"""Of a program. With 32 Triton 3.6 does not compile the sums; rows so narrow are those of toy models."""
_COPIED, _SUMMED = 16, 8
"""Elements of keys, and as many of values, that a thread holds: one or two accesses of 16 bytes each in bfloat16."""


def lay_out(
    key: torch.Tensor, value: torch.Tensor, tokens_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, ...] of dense [T, ...], both of one shape: place r holds row ``tokens_R[r]`` (int32)."""
    assert key.is_contiguous() and value.is_contiguous() and key.shape == value.shape
    num_places = len(tokens_R)
    key_R, value_R = (x.new_empty((num_places, *x.shape[1:])) for x in (key, value))
    if num_places:
        block = _block(key, _COPIED)
        grid = (triton.cdiv(num_places, block["B"]),)
        _lay_out[grid](key, value, tokens_R, key_R, value_R, num_places, **block)
    return key_R, value_R


def row_sums(
    key_R: torch.Tensor, value_R: torch.Tensor, starts: torch.Tensor, places_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, ...] of dense [R, ...], both of one shape; sum t is over ``places_R`` from ``starts[t]`` to
    ``starts[t + 1]`` (int32)."""
    assert key_R.is_contiguous() and value_R.is_contiguous() and key_R.shape == value_R.shape
    num_sums = len(starts) - 1
    key, value = (x.new_empty((num_sums, *x.shape[1:])) for x in (key_R, value_R))
    if num_sums:
        block = _block(key, _SUMMED)
        grid = (triton.cdiv(num_sums, block["B"]),)
        _row_sums[grid](key_R, value_R, starts, places_R, key, value, num_sums, **block)
    return key, value


def _block(rows: torch.Tensor, per_thread: int) -> dict[str, int]:
    """What one program does: as many whole rows as four warps hold, with more warps for a wider row."""
    width = math.prod(rows.shape[1:])
    padded = triton.next_power_of_2(width)
    num_rows = max(1, min(_MAX_ROWS, _USUAL_WARPS * 32 * per_thread // padded))
    num_warps = max(1, min(_MAX_WARPS, num_rows * padded // (32 * per_thread)))
    return {"W": width, "W_PAD": padded, "B": num_rows, "num_warps": num_warps}


# Lists of places begin anywhere in the memory they share, and their lengths are of all kinds; a variant for each kind
# would be compiled in the middle of training, and be no faster.
@triton.jit(do_not_specialize=["num_places"], do_not_specialize_on_alignment=["tokens"])
def _lay_out(
    key, value, tokens, key_out, value_out, num_places,
    W: tl.constexpr, W_PAD: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    place_B = tl.program_id(0) * B + tl.arange(0, B)
    there_B = place_B < num_places
    token_B = tl.load(tokens + place_B, mask=there_B, other=0)
    within_W = tl.arange(0, W_PAD)
    there_BW = there_B[:, None] & (within_W < W)[None, :]
    from_BW = token_B.to(tl.int64)[:, None] * W + within_W[None, :]
    to_BW = place_B.to(tl.int64)[:, None] * W + within_W[None, :]
    key_BW = tl.load(key + from_BW, mask=there_BW)
    value_BW = tl.load(value + from_BW, mask=there_BW)
    tl.store(key_out + to_BW, key_BW, mask=there_BW)
    tl.store(value_out + to_BW, value_BW, mask=there_BW)


@triton.jit(do_not_specialize=["num_sums"], do_not_specialize_on_alignment=["starts", "places"])
def _row_sums(
    key, value, starts, places, key_out, value_out, num_sums,
    W: tl.constexpr, W_PAD: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row_B = tl.program_id(0) * B + tl.arange(0, B)
    there_B = row_B < num_sums
    at_B = tl.load(starts + row_B, mask=there_B, other=0)
    end_B = tl.load(starts + row_B + 1, mask=there_B, other=0)
    most = tl.max(end_B - at_B)
    # Sums begin with a zero, and a place that is not there adds another, which changes no bit of them.
    key_BW, value_BW = _added(0.0, 0.0, _read(key, value, places, at_B, end_B, W, W_PAD))
    # Nearly all rows have one place. Of those with more, three places wait in a queue while the next is asked for:
    # their loop carries them, since the assembler puts loads of one turn off until each is added.
    if most > 1:
        key_1, value_1 = _read(key, value, places, at_B + 1, end_B, W, W_PAD)
        key_2, value_2 = _read(key, value, places, at_B + 2, end_B, W, W_PAD)
        key_3, value_3 = _read(key, value, places, at_B + 3, end_B, W, W_PAD)
        for number in range(1, most):
            next_key, next_value = _read(key, value, places, at_B + number + 3, end_B, W, W_PAD)
            key_BW, value_BW = _added(key_BW, value_BW, (key_1, value_1))
            key_1, value_1, key_2, value_2 = key_2, value_2, key_3, value_3
            key_3, value_3 = next_key, next_value
    within_W = tl.arange(0, W_PAD)
    there_BW = there_B[:, None] & (within_W < W)[None, :]
    to_BW = row_B.to(tl.int64)[:, None] * W + within_W[None, :]
    tl.store(key_out + to_BW, key_BW.to(key_out.dtype.element_ty), mask=there_BW)
    tl.store(value_out + to_BW, value_BW.to(value_out.dtype.element_ty), mask=there_BW)


@triton.jit
def _read(key, value, places, at_B, end_B, W: tl.constexpr, W_PAD: tl.constexpr):
    """The rows at one place of each sum; zeros where it has no more."""
    there_B = at_B < end_B
    place_B = tl.load(places + at_B, mask=there_B, other=0)
    within_W = tl.arange(0, W_PAD)
    there_BW = there_B[:, None] & (within_W < W)[None, :]
    from_BW = place_B.to(tl.int64)[:, None] * W + within_W[None, :]
    key_BW = tl.load(key + from_BW, mask=there_BW, other=0.0)
    value_BW = tl.load(value + from_BW, mask=there_BW, other=0.0)
    return key_BW, value_BW


@triton.jit
def _added(key_BW, value_BW, read):
    return key_BW + read[0].to(tl.float32), value_BW + read[1].to(tl.float32)
