"""Attention over two sets of keys made one, in place.

In: outputs of the same queries over either set, and their log-sum-exps in float32. Out: the output over both sets and
its log-sum-exp, where the first part was. Every element is read once and written once.

Shape legend: T tokens, H query heads, D head size.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS = 32


def merge(
    out_THD: torch.Tensor, lse_HT: torch.Tensor, part_THD: torch.Tensor, part_lse_HT: torch.Tensor
) -> None:
    """Heads are dense in D; all other strides are free."""
    num_tokens, num_heads, size = out_THD.shape
    assert out_THD.stride(2) == part_THD.stride(2) == 1
    # Heads come first, since those of a token lie side by side.
    _merge[(num_heads * triton.cdiv(num_tokens, _TOKENS),)](
        out_THD,
        lse_HT,
        part_THD,
        part_lse_HT,
        num_tokens,
        num_heads,
        *out_THD.stride()[:2],
        *lse_HT.stride(),
        *part_THD.stride()[:2],
        *part_lse_HT.stride(),
        D=size,
        D_PAD=triton.next_power_of_2(size),
        TOKENS=_TOKENS,
        num_warps=4,
    )


@triton.jit
def _merge(
    out,
    lse,
    part,
    part_lse,
    num_tokens,
    num_heads,
    out_stride_t,
    out_stride_h,
    lse_stride_h,
    lse_stride_t,
    part_stride_t,
    part_stride_h,
    part_lse_stride_h,
    part_lse_stride_t,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    tokens_T = (tl.program_id(0) // num_heads).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    real_T = tokens_T < num_tokens
    lse_at_T = lse + head * lse_stride_h + tokens_T * lse_stride_t
    part_lse_at_T = part_lse + head * part_lse_stride_h + tokens_T * part_lse_stride_t
    lse_T = tl.load(lse_at_T, mask=real_T, other=0.0)
    part_lse_T = tl.load(part_lse_at_T, mask=real_T, other=0.0)
    top_T = tl.maximum(lse_T, part_lse_T)
    weight_T, part_weight_T = tl.exp(lse_T - top_T), tl.exp(part_lse_T - top_T)
    total_T = weight_T + part_weight_T

    dims_D = tl.arange(0, D_PAD)
    real_TD = real_T[:, None] if D == D_PAD else real_T[:, None] & (dims_D < D)[None, :]
    out_at_TD = out + tokens_T[:, None] * out_stride_t + head * out_stride_h + dims_D[None, :]
    part_at_TD = part + tokens_T[:, None] * part_stride_t + head * part_stride_h + dims_D[None, :]
    out_TD = tl.load(out_at_TD, mask=real_TD, other=0.0).to(tl.float32)
    part_TD = tl.load(part_at_TD, mask=real_TD, other=0.0).to(tl.float32)
    merged_TD = out_TD * (weight_T / total_T)[:, None] + part_TD * (part_weight_T / total_T)[:, None]
    tl.store(out_at_TD, merged_TD.to(out.dtype.element_ty), mask=real_TD)
    # Several threads may have read the same entry, and none may read what another has written.
    tl.debug_barrier()
    tl.store(lse_at_T, top_T + tl.log(total_T), mask=real_T)
