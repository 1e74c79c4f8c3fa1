"""Arrays on their way to a device.

In: a numpy array. Out: a tensor on the device with the same entries. On a GPU the copy is queued behind what the GPU
was given before and read from pinned memory, so that the host goes on at once; from ordinary memory it would have to
wait until the GPU has come to it.
"""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
