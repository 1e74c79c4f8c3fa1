"""How a process takes its GPU memory: in segments that grow where they are, or in pieces of fixed size.

A trainer's rows differ in length, and what is free between pieces made for one length is lost to another: segments
that grow leave no such gaps. But memory in them is handed to other processes through file descriptors, which many
containers forbid. So memory for other processes is taken in ``fixed_segments``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def grow_segments(growing: bool = True) -> None:
    """From now on, in this process."""
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{growing}")


@contextmanager
def fixed_segments() -> Iterator[None]:
    """In a process whose segments grow: what is taken inside can be opened by others."""
    grow_segments(False)
    try:
        yield
    finally:
        grow_segments()
