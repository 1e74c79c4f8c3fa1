"""Kernels run on CUDA where there is a device, and in Triton's interpreter elsewhere."""

from __future__ import annotations

import os
import sys

import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    # Read when Triton is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
