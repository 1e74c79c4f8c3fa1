"""Matrices that kernels copy in whole tiles, zeros beyond their edges."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def in_tiles(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of a dense matrix, whose rows have a multiple of ``chip.ALIGNED`` numbers."""
    # A dense matrix of one row may call its strides anything.
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], [rows, columns])
