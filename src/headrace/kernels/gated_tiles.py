"""How the products of a gated layer are cut into tiles: the way that should take the least time.

In: how many rows, inputs and inner columns there are, and how many multiprocessors. Out: tiles for the kernel of
``gated_library`` or for ours, or None where another way is quicker: last of all torch's product in float32 and a pass
over it. Programs run in waves, as many at once as there is room for, and the last wave costs as much as a full one;
which tiles are best thus depends on how they fill it. The numbers are fitted to timings on an H200
(docs/kernels.md).
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.kernels.chip import ALIGNED

FEW_ROWS = 64
"""Up to which weights are the left operand."""
_NARROW_INPUTS = 2048
_TORCH_ROWS_NARROW, _TORCH_ROWS_WIDE = 256, 512
"""Up to where torch's product may be the quicker way: the narrower a model, the larger a part of the whole is a pass
over its products."""
_FITTED_INPUTS, _FITTED_WIDTH = 1536, 8960
_LIBRARY_ROWS = 128
"""Of its usual tile. Rows that a tile has too many cost more than those that are there."""
_LEAST_OF_TWO, _LEAST_OF_THREE = 177, 337
"""Rows from which two or three such tiles are full enough."""
_GRADIENT_ROWS = 1024
"""From which the kernel of gradients is used: those of a training step are many."""


class Tiles(NamedTuple):
    rows: int
    columns: int
    inputs: int
    num_warps: int
    num_stages: int
    weights_left: bool
    """Whether the weights are the left operand of the product and the rows the right one."""
    together: int
    """Tiles of rows that are computed side by side, so that they find their weights in the cache."""


class LibraryTiles(NamedTuple):
    rows: int
    columns: int
    """Of gate and up together."""
    in_turns: bool
    """Whether two groups of warps have a tile each, and one multiplies while the other writes."""
    cluster: tuple[int, int]
    """Tiles, along rows and columns, that share what they read."""


_HALF = LibraryTiles(64, 192, True, (2, 1))
_USUAL = LibraryTiles(_LIBRARY_ROWS, 192, True, (2, 1))
_WIDE = LibraryTiles(_LIBRARY_ROWS, 224, False, (1, 1))
GRADIENT_TILES = (
    LibraryTiles(128, 128, True, (2, 1)),
    LibraryTiles(256, 128, False, (2, 1)),
    LibraryTiles(128, 256, False, (2, 1)),
    LibraryTiles(256, 160, False, (2, 1)),
)
"""Of gradients: those for which the compiler keeps nothing in memory for want of registers, the one in use first."""


class _Way(NamedTuple):
    tiles: Tiles
    at_once: int
    """Programs that a multiprocessor has room for."""
    begin_us: float
    wave_us: float
    """Of the fitted inputs; both grow with them."""

    def us(self, num_rows: int, num_inputs: int, width: int, num_multiprocessors: int) -> float:
        programs = -(-num_rows // self.tiles.rows) * -(-width // self.tiles.columns)
        waves = -(-programs // (self.at_once * num_multiprocessors))
        return (self.begin_us + self.wave_us * waves) * num_inputs / _FITTED_INPUTS


_MANY = Tiles(128, 128, 64, 8, 4, False, 8)
_WAYS = (
    _Way(_MANY, 1, 4.3, 17.5),
    _Way(Tiles(128, 64, 64, 4, 3, False, 8), 2, 8.4, 15.8),
    _Way(Tiles(64, 64, 64, 4, 4, False, 8), 2, 0.4, 13.0),
)
TILES_OF_MANY = tuple(way.tiles for way in _WAYS)
"""Of which one is chosen for more rows than few."""


def choose_library_tiles(num_rows: int, num_inputs: int, width: int) -> LibraryTiles | None:
    """None: another way is quicker, or the only one."""
    if num_inputs % ALIGNED or width % ALIGNED or num_rows <= FEW_ROWS:
        return None
    match -(-num_rows // _LIBRARY_ROWS):
        case 1:
            return _HALF
        case 2:
            return _USUAL if num_rows >= _LEAST_OF_TWO else None
        case 3:
            return _WIDE if num_rows >= _LEAST_OF_THREE else None
    return _USUAL


def choose_gradient_tiles(num_rows: int, num_inputs: int, width: int) -> LibraryTiles | None:
    """None: torch's product and a pass are to be used."""
    if num_inputs % ALIGNED or width % ALIGNED or num_rows < _GRADIENT_ROWS:
        return None
    return GRADIENT_TILES[0]


def choose_tiles(
    num_rows: int, num_inputs: int, width: int, *, keep: bool, num_multiprocessors: int
) -> Tiles | None:
    """None: torch's product is the quicker way, or the only one. With ``keep`` the kernel is used for any number of
    rows: those of a training step are many."""
    if num_inputs % ALIGNED:
        return None
    narrow = num_inputs <= _NARROW_INPUTS
    if num_rows <= FEW_ROWS:
        return Tiles(max(16, 1 << (num_rows - 1).bit_length()), 64, 64 if narrow else 128, 4, 4, True, 1)
    if keep or not narrow:
        return _MANY if keep or num_rows > _TORCH_ROWS_WIDE else None
    sizes = (num_rows, num_inputs, width, num_multiprocessors)
    best = min(_WAYS, key=lambda way: way.us(*sizes))
    if num_rows <= _TORCH_ROWS_NARROW and _torch_us(num_rows, num_inputs, width) < best.us(*sizes):
        return None
    return best.tiles


def _torch_us(num_rows: int, num_inputs: int, width: int) -> float:
    """A start, the weights' way through memory, and a pass over the products."""
    wide = width / _FITTED_WIDTH
    return 3.0 + 17.0 * wide * num_inputs / _FITTED_INPUTS + 0.036 * wide * num_rows
