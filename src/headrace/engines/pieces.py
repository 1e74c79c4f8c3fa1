"""Runs of prompt rows, laid out one behind the other as the rows of one pass.

In: pieces, each consecutive rows of one sequence. Out: what a pass must know of its rows and of its pieces, as arrays.

Shape legend: T rows of the pass, N pieces, W blocks of the piece that reaches furthest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.engines.kv_cache import SCRATCH_BLOCK


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one sequence, the first at position ``start``."""

    slot: int
    start: int
    token_ids: np.ndarray
    blocks: np.ndarray
    """Its block table, up to the last row at least."""
    adapter: int = 0
    only_logits: bool = False
    """Keys and values lie there already, and are written to the scratch block instead."""


@dataclass(frozen=True, slots=True)
class PieceLayout:
    rows: np.ndarray
    """int64 [4, T]: token, position, place in the pool (block * S + row) and adapter of each row."""
    pieces: np.ndarray
    """int64 [4, N]: slot, position of the first row, number of rows and first row in the pass, of each piece."""
    blocks: np.ndarray
    """[N, W], the tables up to the last row of the pass."""

    @property
    def num_rows(self) -> int:
        return self.rows.shape[1]

    @property
    def places(self) -> np.ndarray:
        return self.rows[2]

    @property
    def num_pieces(self) -> int:
        return self.pieces.shape[1]

    def last_rows(self, which: Sequence[int]) -> np.ndarray:
        """int64, the last row of each of these pieces."""
        return self.pieces[2:, list(which)].sum(axis=0) - 1


def lay_out(pieces: Sequence[Piece], block_size: int) -> PieceLayout:
    counts = np.array([len(piece.token_ids) for piece in pieces])
    positions = np.concatenate([piece.start + np.arange(len(piece.token_ids)) for piece in pieces])
    of_piece = np.repeat(np.arange(len(pieces)), counts)
    width = int(positions.max()) // block_size + 1
    blocks = np.stack([piece.blocks[:width] for piece in pieces])
    written = blocks[of_piece, positions // block_size]
    written[np.array([piece.only_logits for piece in pieces])[of_piece]] = SCRATCH_BLOCK
    places = written * block_size + positions % block_size
    token_ids = np.concatenate([piece.token_ids for piece in pieces])
    adapters = np.array([piece.adapter for piece in pieces])[of_piece]
    slots, starts = (np.array([getattr(piece, name) for piece in pieces]) for name in ("slot", "start"))
    return PieceLayout(
        rows=np.stack((token_ids, positions, places, adapters)).astype(np.int64),
        pieces=np.stack((slots, starts, counts, np.cumsum(counts) - counts)).astype(np.int64),
        blocks=blocks,
    )
