"""The output layer's logits in float32, wherever they are computed.

Both sides of the importance ratio use this: products of the weights' own type, summed and kept in float32. A
head that rounds its logits to bfloat16 alone costs more agreement than everything below it.

Shape legend: R rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch


def float_logits(
    hidden_RD: torch.Tensor, weight_VD: torch.Tensor, out_RV: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [R, V], written to ``out_RV`` where that is given. Without gradients."""
    if hidden_RD.device.type == "cuda" and hidden_RD.dtype != torch.float32:
        if out_RV is None:
            return torch.mm(hidden_RD, weight_VD.t(), out_dtype=torch.float32)
        torch.ops.aten.mm.dtype_out(hidden_RD, weight_VD.t(), torch.float32, out=out_RV)
        return out_RV
    logits_RV = torch.nn.functional.linear(hidden_RD.float(), weight_VD.float())
    return logits_RV if out_RV is None else out_RV.copy_(logits_RV)
