"""The output head's matrix products in training, a chunk of tokens at a time.

In: hidden states and head weight of one dtype. Out: float32 logits as engines compute them, and the two
gradient products, summed in float32. On a GPU the operands keep their dtype; a CPU is given float32 ones.

Legend: C tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from headrace.models.head import float_logits


def chunk_length(num_tokens: int, longest: int) -> int:
    """Of chunks as few and as even as can be."""
    return -(-num_tokens // max(-(-num_tokens // longest), 1))


def chunks(num_tokens: int, longest: int) -> list[slice]:
    length = chunk_length(num_tokens, longest)
    return [slice(start, start + length) for start in range(0, num_tokens, max(length, 1))]


def uncapped_logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None
) -> torch.Tensor:
    """In float32, before they are capped."""
    logits_CV = head_logits(hidden_CH, weight_VH)
    if bias_V is not None:
        logits_CV += bias_V.float()
    return logits_CV


def capped_logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, softcap: float | None
) -> torch.Tensor:
    logits_CV = uncapped_logits(hidden_CH, weight_VH, bias_V)
    return logits_CV if softcap is None else logits_CV.div_(softcap).tanh_().mul_(softcap)


class HeadGradients:
    """What the backward of a head gives, added up over its chunks. The weight's part goes to the gradient of
    ``master_VH``, where one is given."""

    def __init__(
        self,
        needed: Sequence[bool],
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        master_VH: torch.Tensor | None,
    ) -> None:
        """``needed``: of hidden states, weight and bias, as autograd says."""
        self._hidden_NH, self._weight_VH, self._master_VH = hidden_NH, weight_VH, master_VH
        self._of_hidden_NH = torch.empty_like(hidden_NH)
        self._of_weight_VH = _sum_for(weight_VH, master_VH) if needed[1] else None
        self._of_bias_V = (
            torch.zeros_like(bias_V, dtype=torch.float32) if needed[2] and bias_V is not None else None
        )

    def add(self, chunk: slice, grad_CV: torch.Tensor, factor_C: torch.Tensor | None = None) -> None:
        """``grad_CV``: of the uncapped logits of these tokens, up to the ``factor_C`` of each."""
        of_hidden_CH, hidden_CH = head_input_gradient(grad_CV, self._weight_VH), self._hidden_NH[chunk]
        self._of_hidden_NH[chunk] = of_hidden_CH if factor_C is None else of_hidden_CH.mul_(factor_C[:, None])
        del of_hidden_CH
        if factor_C is not None:
            hidden_CH = (hidden_CH * factor_C[:, None]).to(hidden_CH.dtype)
        if self._of_weight_VH is not None:
            add_head_weight_gradient(self._of_weight_VH, grad_CV, hidden_CH)
        if self._of_bias_V is not None:
            self._of_bias_V += _weighted_sum(grad_CV, factor_C)

    def results(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Of hidden states, weight (None: it is with the master, or not needed) and bias."""
        if self._of_weight_VH is None or self._master_VH is not None:
            return self._of_hidden_NH, None, self._of_bias_V
        return self._of_hidden_NH, self._of_weight_VH.to(self._weight_VH.dtype), self._of_bias_V


def _sum_for(weight_VH: torch.Tensor, master_VH: torch.Tensor | None) -> torch.Tensor:
    """The master's gradient, or zeros for one of the weight's own."""
    if master_VH is None:
        return torch.zeros_like(weight_VH, dtype=torch.float32)
    if master_VH.grad is None:
        master_VH.grad = torch.zeros_like(master_VH)
    return master_VH.grad


@cache
def fused(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """On a GPU each function is one pass over its chunk instead of a dozen. The vocabulary stays a constant of the
    compiled code; a chunk's length is a variable from the first one on."""
    if device_type != "cuda":
        return function
    compiled = torch.compile(function)

    def call(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled(*arguments)

    return call


def _weighted_sum(grad_CV: torch.Tensor, factor_C: torch.Tensor | None) -> torch.Tensor:
    """float32 [V], over the tokens; on a GPU without a wide copy of what may be gigabytes."""
    factor_C = grad_CV.new_ones(len(grad_CV)) if factor_C is None else factor_C
    if _narrow_on_gpu(grad_CV):
        return torch.mm(factor_C[None].to(grad_CV.dtype), grad_CV, out_dtype=torch.float32)[0]
    return factor_C.float() @ grad_CV.float()


def head_logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """float32 [C, V]."""
    if _narrow_on_gpu(hidden_CH):
        return float_logits(hidden_CH, weight_VH)
    return float_logits(hidden_CH.float(), weight_VH.float())


def head_input_gradient(grad_CV: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """float32 [C, H]."""
    if _narrow_on_gpu(weight_VH):
        return torch.mm(grad_CV, weight_VH, out_dtype=torch.float32)
    return grad_CV.float() @ weight_VH.float()


def add_head_weight_gradient(total_VH: torch.Tensor, grad_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
    """Adds to a float32 ``total_VH``."""
    if _narrow_on_gpu(hidden_CH):
        torch.ops.aten.addmm.dtype_out(total_VH, grad_CV.T, hidden_CH, torch.float32, out=total_VH)
    else:
        total_VH.addmm_(grad_CV.float().T, hidden_CH.float())


def _narrow_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype != torch.float32
