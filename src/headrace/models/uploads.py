"""Arrays on their way to a device.

In: a numpy array. Out: a tensor on the device with the same entries. On a GPU the copy is queued behind what the GPU
was given before and read from pinned memory, so that the host goes on at once; from ordinary memory it would have to
wait until the GPU has come to it.
"""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    place = torch.device(device)
    return to_pinned(np.ascontiguousarray(array), place).to(place, non_blocking=place.type == "cuda")


def to_pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array in memory that a copy to the device need not wait for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
