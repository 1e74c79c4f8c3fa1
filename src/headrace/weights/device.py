"""What ``bundle`` and ``delta`` do on the host, for tensors on a GPU: the same numbers, computed where they are.

In: uint8 tensors. Out: numpy arrays on the host. Only what changed crosses over, and a sum for each chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headrace.types import TensorPatch
from headrace.weights.bundle import CHUNK_BYTES

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changed(old: torch.Tensor, new: torch.Tensor, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places, old and new bits of what differs."""
    before, after = old.view(_SIGNED[width]), new.view(_SIGNED[width])
    places = (before != after).nonzero().squeeze(1)
    bits = [side[places].cpu().numpy().view(f"u{width}") for side in (before, after)]
    return places.cpu().numpy(), bits[0], bits[1]


def bits_at(old: torch.Tensor, places: np.ndarray, unsigned: np.dtype[Any]) -> np.ndarray:
    at = torch.from_numpy(places).to(old.device)
    taken: np.ndarray = old.view(_SIGNED[unsigned.itemsize])[at].cpu().numpy().view(unsigned)
    return taken


def uploaded(patch: TensorPatch, device: torch.device) -> TensorPatch:
    """The patch on a device, so that applying it waits for nothing."""
    bits = patch.bits.view(f"i{patch.bits.itemsize}")
    return replace(
        patch,
        places=torch.from_numpy(patch.places).to(device),
        bits=torch.from_numpy(bits).to(device),
    )


def patched(old: torch.Tensor, patch: TensorPatch) -> torch.Tensor:
    """A changed copy of a uint8 tensor."""
    copy = old.clone()
    copy.view(patch.bits.dtype)[patch.places] = patch.bits
    return copy


@contextmanager
def beside(tensor: torch.Tensor, *, waits: bool = True) -> Iterator[None]:
    """Work on a stream of its own, so that whatever else is computed on the same device goes on. It ``waits`` for
    what was launched there before, which may still use the tensor's memory; bytes that are complete need not."""
    if tensor.device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(tensor.device)
    if waits:
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def chunk_sums(data: torch.Tensor) -> np.ndarray:
    """uint64, the sums of ``bundle.chunk_sums``."""
    padded = torch.nn.functional.pad(data, (0, -len(data) % CHUNK_BYTES))
    words = padded.view(torch.int64).view(-1, CHUNK_BYTES // 8)
    sums: np.ndarray = words.sum(dim=1).cpu().numpy().view(np.uint64)
    return sums
