"""Float32 master weights -> blobs in the dtype the engines compute in.

In: the trained model. Out: ``TensorBlob`` objects. On a CPU a float32 blob is the model's own memory, which a
sender copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from headrace.models.tensors import to_blobs
from headrace.types import TensorBlob


def published_blobs(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[TensorBlob]:
    for blob in to_blobs(model):
        if blob.dtype == "F32" and dtype == torch.bfloat16:
            narrow = torch.from_numpy(blob.data).view(torch.float32).to(torch.bfloat16)
            yield replace(blob, dtype="BF16", data=narrow.view(torch.uint8).numpy())
        else:
            yield blob
