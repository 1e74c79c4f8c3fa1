"""Which rows of a decode pass have their prompt in the same blocks.

In: the block tables of the decoding slots. Out: pieces of at most ``MAX_MEMBERS`` rows and the length of the prefix
each has in common. Only blocks of prompts are looked at, and of these such as lie before the row: they stay a
sequence's own until it leaves its slot.

Every piece is right, since its rows are compared block by block; which rows are put together is a good choice and
not always the best.

Shape legend: B rows of the pass, C columns of the block tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.engines.sequences import SlotTable
from headrace.kernels.shared_prefixes import MAX_MEMBERS

_SORTED_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """The arrays of ``SharedPrefixes`` without room to spare, on the host."""

    begins: np.ndarray
    members: np.ndarray
    starts: np.ndarray

    @property
    def num_pieces(self) -> int:
        return len(self.starts) - 1

    @property
    def saved_tokens(self) -> int:
        """Key-value rows that need not be read, because another row of the piece has them."""
        return int(self.begins.sum() - self.begins[self.members[self.starts[:-1]]].sum())


class SharedPromptFinder:
    """Remembers what it found last: most passes have the rows of the one before."""

    def __init__(self) -> None:
        self._tenants = np.zeros(0, dtype=np.int64)
        self.nothing = self._found = shared_prompts(np.zeros((0, 0), dtype=np.int64), self._tenants, 1)

    def find(self, table: SlotTable, slots: np.ndarray) -> SharedPrompts:
        """Of these slots, all of which decode."""
        # A number of its own for every placement, so it stands for the slot as well.
        tenants = table.tenant[slots]
        if not np.array_equal(tenants, self._tenants):
            depths = np.minimum(table.num_prompt[slots], table.computed[slots]) // table.block_size
            self._tenants = tenants
            self._found = shared_prompts(table.blocks[slots], depths, table.block_size)
        return self._found


def shared_prompts(blocks_BC: np.ndarray, depths_B: np.ndarray, block_size: int) -> SharedPrompts:
    """``depths_B``: columns of each row that may be shared."""
    num_rows = len(depths_B)
    num_columns = int(depths_B.max(initial=0))
    inside_BC = np.arange(num_columns) < depths_B[:, None]
    blocks_BC = np.where(inside_BC, blocks_BC[:, :num_columns], 0)
    order_B = _alike_together(blocks_BC, depths_B)
    common_B = _common_columns(blocks_BC[order_B])
    firsts = np.flatnonzero(_opens_piece(common_B))
    counts = np.diff(firsts, append=num_rows)
    # Between any two neighbours of a piece it is the same, so the second row tells it for all.
    prefixes = common_B[np.minimum(firsts + 1, num_rows - 1)] * block_size
    several = counts > 1
    members = order_B[np.repeat(several, counts)]
    begins_B = np.zeros(num_rows, dtype=np.int64)
    begins_B[members] = np.repeat(prefixes[several], counts[several])
    return SharedPrompts(begins_B, members, np.cumsum([0, *counts[several]]))


def _alike_together(blocks_BC: np.ndarray, depths_B: np.ndarray) -> np.ndarray:
    """An order of the rows that has those with the same leading blocks next to each other. Long tables are sorted by
    some of their columns, so that sorting costs no more for them, and by the last block that counts."""
    num_rows, num_columns = blocks_BC.shape
    if num_columns == 0:
        return np.arange(num_rows)
    columns = np.unique(np.linspace(0, num_columns - 1, _SORTED_COLUMNS).astype(np.int64))
    # Numbers with the high byte first sort as text does, and numpy sorts text by rows.
    keys = np.empty((num_rows, len(columns) + 1), dtype=">i4")
    keys[:, :-1] = blocks_BC[:, columns]
    keys[:, -1] = blocks_BC[np.arange(num_rows), np.maximum(depths_B - 1, 0)]
    return np.argsort(keys.view(f"S{keys.itemsize * keys.shape[1]}")[:, 0], kind="stable")


def _common_columns(blocks_BC: np.ndarray) -> np.ndarray:
    """int64 [B], leading blocks that each row has in common with the row before it; 0 for the first."""
    num_rows, num_columns = blocks_BC.shape
    common_B = np.zeros(num_rows, dtype=np.int64)
    if num_rows and num_columns:
        same = (blocks_BC[1:] == blocks_BC[:-1]) & (blocks_BC[1:] > 0)
        common_B[1:] = np.where(same.all(axis=1), num_columns, same.argmin(axis=1))
    return common_B


def _opens_piece(common_B: np.ndarray) -> np.ndarray:
    """bool [B], where the row does not join the one before it: they have nothing in common, or one of the two has
    more in common with its other neighbour, or the piece is full."""
    before, after = np.roll(common_B, 1), np.roll(common_B, -1)
    opens_B = (common_B == 0) | (common_B < np.maximum(before, after))
    at_B = np.arange(len(common_B))
    place_B = at_B - np.maximum.accumulate(np.where(opens_B, at_B, 0))
    return opens_B | (place_B % MAX_MEMBERS == 0)
