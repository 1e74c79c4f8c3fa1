"""How large a delta of bfloat16 weights is after some steps of Adam.

In: nothing. Out: bytes and changed weights as shares of the whole, against the version before and against that of the
first step. Weights have a sigma of 0.02; gradients are independent noise, so steps partly undo each other, as they do
in training; a gradient that never changed its sign would move three times as many weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from headrace.types import TensorBlob
from headrace.weights.delta import decode, encode

_NUM_WEIGHTS = 2_000_000


def adam_versions(
    steps: int, *, num_weights: int = _NUM_WEIGHTS, learning_rate: float = 1e-6, seed: int = 0
) -> Iterator[TensorBlob]:
    """The weights at the start and after each step."""
    generator = torch.Generator().manual_seed(seed)
    masters = torch.nn.Parameter(torch.randn(num_weights, generator=generator) * 0.02)
    optimizer = torch.optim.AdamW([masters], lr=learning_rate, weight_decay=0.0)
    for step in range(steps + 1):
        if step:
            masters.grad = torch.randn(num_weights, generator=generator)
            optimizer.step()
        data = masters.detach().bfloat16().view(torch.uint8).numpy()
        yield TensorBlob(name="weights", dtype="BF16", shape=(num_weights,), data=data)


def run(steps: int = 20) -> dict[str, float]:
    """Shares of the full bytes and of the weights. Raises if a delta does not restore every bit."""
    versions = list(adam_versions(steps))
    first, before, last = versions[0], versions[-2], versions[-1]
    since_first, since_last = _shares(first, last), _shares(before, last)
    return {
        "steps": steps,
        "bytes_share": since_first[0],
        "changed_share": since_first[1],
        "one_step_bytes_share": since_last[0],
        "one_step_changed_share": since_last[1],
    }


def _shares(old: TensorBlob, new: TensorBlob) -> tuple[float, float]:
    encoded = encode(old.data, new)
    patch = decode(encoded, old.data)
    restored = old.data.copy()
    restored.view(patch.bits.dtype)[patch.places] = patch.bits
    assert np.array_equal(restored, new.data), "the delta is not exact"
    return encoded.data.nbytes / new.data.nbytes, len(patch.places) / new.shape[0]
