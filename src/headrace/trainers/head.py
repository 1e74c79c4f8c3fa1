"""The output head's matrix products in training, a chunk of tokens at a time.

In: hidden states and head weight of one dtype. Out: float32 logits as engines compute them, and the two
gradient products, summed in float32. On a GPU the operands keep their dtype; a CPU is given float32 ones.

Legend: C tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from headrace.models.head import float_logits


def chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]


def chunk_logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Capped float32 logits, and the slope of the cap (None without one)."""
    logits_CV = head_logits(hidden_CH, weight_VH)
    if bias_V is not None:
        logits_CV += bias_V.float()
    if softcap is None:
        return logits_CV, None
    tanh_CV = torch.tanh(logits_CV / softcap)
    return tanh_CV * softcap, 1 - tanh_CV.square()


@cache
def fused(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """On a GPU each function is one or two passes over its chunk instead of a dozen. The vocabulary stays a
    constant of the compiled code; a chunk of another length makes its length a variable."""
    return torch.compile(function) if device_type == "cuda" else function


def head_logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """float32 [C, V]."""
    if _narrow_on_gpu(hidden_CH):
        return float_logits(hidden_CH, weight_VH)
    return float_logits(hidden_CH.float(), weight_VH.float())


def head_input_gradient(grad_CV: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """[C, H] in the weight's dtype."""
    if _narrow_on_gpu(weight_VH):
        return grad_CV @ weight_VH
    return (grad_CV.float() @ weight_VH.float()).to(weight_VH.dtype)


def add_head_weight_gradient(total_VH: torch.Tensor, grad_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
    """Adds to a float32 ``total_VH``."""
    if _narrow_on_gpu(hidden_CH):
        torch.ops.aten.addmm.dtype_out(total_VH, grad_CV.T, hidden_CH, torch.float32, out=total_VH)
    else:
        total_VH.addmm_(grad_CV.float().T, hidden_CH.float())


def _narrow_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype != torch.float32
