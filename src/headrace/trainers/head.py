"""The output head's matrix products in training.

In: hidden states and head weight of one dtype. Out: float32 logits as engines compute them, and the two
gradient products, summed in float32. On a GPU the operands keep their dtype; a CPU is given float32 ones.

Legend: C tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from headrace.models.head import float_logits


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
