"""Which tiles a gated product is cut into, for the models it was timed with and at its edges."""

from __future__ import annotations

import pytest

from headrace.kernels.gated_tiles import (
    GRADIENT_TILES,
    LibraryTiles,
    choose_gradient_tiles,
    choose_library_tiles,
    choose_tiles,
)

# Inputs and inner width of Qwen2 0.5B, 1.5B and 7B.
SMALL, MIDDLE, LARGE = (896, 4864), (1536, 8960), (3584, 18944)


def chosen(num_rows, shape, *, keep=False):
    """(rows, columns) of a tile on a chip of 132 multiprocessors; None: torch."""
    tiles = choose_tiles(num_rows, *shape, keep=keep, num_multiprocessors=132)
    return None if tiles is None else (tiles.rows, tiles.columns)


@pytest.mark.parametrize(("num_rows", "tile"), [(1, 16), (16, 16), (17, 32), (64, 64)])
def test_few_rows_are_one_tile(num_rows, tile):
    for shape, keep in ((MIDDLE, False), (LARGE, True)):
        tiles = choose_tiles(num_rows, *shape, keep=keep, num_multiprocessors=132)
        assert tiles is not None and tiles.rows == tile and tiles.weights_left


@pytest.mark.parametrize(
    ("shape", "num_rows", "tiles"),
    [
        # One wave holds all: of small tiles where there are enough of them, of large ones otherwise.
        (SMALL, 96, (64, 64)),
        (SMALL, 192, (64, 64)),
        (SMALL, 224, (128, 128)),
        (MIDDLE, 96, (128, 128)),
        (MIDDLE, 128, (128, 128)),
        # The second wave would be nearly empty.
        (MIDDLE, 144, None),
        (MIDDLE, 192, (64, 64)),
        (MIDDLE, 256, None),
        # From here on torch's is never the quickest.
        (MIDDLE, 257, (128, 128)),
        (MIDDLE, 384, (128, 128)),
        (MIDDLE, 448, (64, 64)),
        (MIDDLE, 512, (128, 64)),
        (LARGE, 65, None),
        (LARGE, 512, None),
        (LARGE, 513, (128, 128)),
    ],
)
def test_tiles_are_those_that_were_quickest(shape, num_rows, tiles):
    assert chosen(num_rows, shape) == tiles


def test_what_is_trained_with_has_one_form():
    assert {
        chosen(num_rows, shape, keep=True) for num_rows in (65, 300, 9000) for shape in (MIDDLE, LARGE)
    } == {(128, 128)}


def test_rows_that_are_no_whole_tiles_of_memory_are_torchs():
    assert all(chosen(num_rows, (1001, 4096), keep=True) is None for num_rows in (1, 100, 1000))


@pytest.mark.parametrize(
    ("num_rows", "tile"),
    [
        (64, None), (65, (64, 192)), (128, (64, 192)), (129, None), (176, None), (177, (128, 192)), (256, (128, 192)),
        (257, None), (336, None), (337, (128, 224)), (384, (128, 224)), (385, (128, 192)), (9000, (128, 192)),
    ],
)  # fmt: skip
def test_the_library_is_given_rows_that_fill_its_tiles(num_rows, tile):
    for shape in (SMALL, MIDDLE, LARGE):
        tiles = choose_library_tiles(num_rows, *shape)
        assert (None if tiles is None else (tiles.rows, tiles.columns)) == tile


def test_the_library_is_given_whole_tiles_of_memory():
    assert choose_library_tiles(512, 1004, 4096) is None
    assert choose_library_tiles(512, 1024, 4100) is None
    assert choose_library_tiles(512, 1024, 4096) == LibraryTiles(128, 192, True, (2, 1))


def test_gradients_of_many_rows_are_the_librarys():
    for shape in (SMALL, MIDDLE, LARGE):
        assert choose_gradient_tiles(1023, *shape) is None
        assert choose_gradient_tiles(1024, *shape) == GRADIENT_TILES[0]
    assert choose_gradient_tiles(9000, 1004, 4096) is None
    assert choose_gradient_tiles(9000, 1024, 4100) is None
