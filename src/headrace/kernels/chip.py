"""What kernels ask of the chip they run on, and where they are run at all."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

HOPPER = 9
ALIGNED, ALIGNED_BYTES = 8, 16
"""What is copied in whole tiles has rows that begin at multiples of 16 bytes: so many numbers of 16 bits."""


class Chip(NamedTuple):
    generation: int
    """The first number of its compute capability; 0: kernels are interpreted."""
    num_multiprocessors: int


H200 = Chip(HOPPER, 132)
"""Tensors without memory (device ``meta``) are taken to be there: kernels are compiled over them, and not run."""
_INTERPRETED = Chip(0, 8)
_WITH_KERNELS = {"cuda"}
"""Kinds of devices; with ``cpu`` among them the interpreter stands in for a GPU, which is for tests."""


def has_kernels(device: torch.device) -> bool:
    """Whether kernels compute there; elsewhere plain torch does."""
    return device.type in _WITH_KERNELS


@cache
def chip(device: torch.device) -> Chip:
    if device.type == "meta":
        return H200
    if device.type != "cuda":
        return _INTERPRETED
    facts = torch.cuda.get_device_properties(device)
    return Chip(facts.major, facts.multi_processor_count)
