"""Which rows of a decode pass begin with the same key-value rows, as the kernels are told of it.

Rows that share a prefix form pieces of 2 to ``MAX_MEMBERS``; a row is in one piece at most. The arrays have
room for any pass of B rows, so that a captured launch stays right when the pieces in them change.

Shape legend: B decode rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_MEMBERS = 8


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """int32 throughout."""

    begins: torch.Tensor
    """[B], key-value rows that a row has in common with its piece, whole blocks of them; 0 for a row of no piece."""
    members: torch.Tensor
    """[B], rows of the pass, piece by piece."""
    starts: torch.Tensor
    """[B // 2 + 1], where in ``members`` each piece starts; one more entry says where the last ends."""
    num_pieces: torch.Tensor
    """[1]"""
