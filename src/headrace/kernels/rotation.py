"""Positions told by turning pairs of numbers: what attention kernels do to queries and keys as they read them.

Shape legend: T rows of a pass, H heads, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rotation(NamedTuple):
    """How far the pairs of a row are turned; a pair is two numbers half a head apart."""

    cos: torch.Tensor
    """[T, D]."""
    sin: torch.Tensor
    """[T, D]."""


def rotated(x_THD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rounded once, as in the kernels (``load_rotated`` in ``kernels/pool``)."""
    first, second = x_THD.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    cos_T1D, sin_T1D = (part.float().unsqueeze(1) for part in rotation)
    return (x_THD.float() * cos_T1D + turned * sin_T1D).to(x_THD.dtype)
