"""The product of few rows against float64, whichever program comes last, launch after launch."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, HALF, relative_error, require_kernels

require_kernels()

from headrace.kernels.skinny_product import (  # noqa: E402
    Tiling,
    product_workspace,
    skinny_product,
    tiles_and_parts,
    usual_tiling,
)

SMALL = Tiling(outputs=32, inputs=32, programs=2, num_warps=4, num_stages=2)


def operands(num_rows: int, num_out: int, num_in: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, matrix and their product in float64. Rows lie in longer ones, which are NaN beyond, and between others
    that are."""
    generator = torch.Generator().manual_seed(num_rows * num_in + num_out)
    wide = torch.full((num_rows + 2, num_in + 32), float("nan"))
    wide[1:-1, :num_in] = torch.randn((num_rows, num_in), generator=generator)
    weight = torch.randn((num_out, num_in), generator=generator).to(HALF)
    x = wide.to(HALF)[1:-1, :num_in]
    return x.to(DEVICE), weight.to(DEVICE), x.double() @ weight.double().T


@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 24, 64, 100, 128])
@pytest.mark.parametrize(("num_out", "num_in"), [(144, 208), (64, 1040), (3088, 80)])
def test_usual_tilings_follow_float64(num_rows: int, num_out: int, num_in: int) -> None:
    tiling, workspace = usual_tiling(num_rows, num_out), product_workspace(DEVICE)
    assert tiling is not None
    workspace.sums.fill_(float("nan"))
    x, weight, expected = operands(num_rows, num_out, num_in)
    out = skinny_product(x, weight, tiling, workspace)
    assert out.dtype == torch.float32 and out.shape == expected.shape
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize(
    ("num_out", "num_in"), [(16, 16), (32, 32), (48, 16), (16, 496), (80, 80), (272, 112), (560, 48)]
)
def test_any_number_of_tiles_and_parts_follows_float64(num_out: int, num_in: int) -> None:
    """One or several of either, with an odd rest or none."""
    x, weight, expected = operands(5, num_out, num_in)
    workspace = product_workspace(DEVICE)
    assert relative_error(skinny_product(x, weight, SMALL, workspace), expected) < 1e-6


def test_a_workspace_is_left_as_it_was_found() -> None:
    """Later products, of other shapes and rows, find it ready."""
    workspace = product_workspace(DEVICE)
    for num_rows, num_out, num_in in ((3, 144, 208), (70, 272, 464), (3, 144, 208)):
        x, weight, expected = operands(num_rows, num_out, num_in)
        tiling = usual_tiling(num_rows, num_out)
        assert tiling is not None
        first, second = (skinny_product(x, weight, tiling, workspace) for _ in range(2))
        assert torch.equal(first, second) and relative_error(first, expected) < 1e-6
        assert torch.count_nonzero(workspace.arrived) == 0


def test_parts_are_added_in_their_order() -> None:
    """Large terms that cancel before small ones come: only in order nothing of the small ones is lost."""
    workspace = product_workspace(DEVICE)
    num_parts = tiles_and_parts(32, 32 * 16, SMALL, workspace.num_multiprocessors)[1]
    assert num_parts >= 4 and 16 % num_parts == 0
    step = 32 * 16 // num_parts
    x, weight = torch.zeros((2, 32 * 16), dtype=HALF), torch.ones((32, 32 * 16), dtype=HALF)
    x[:, 0], x[:, step], x[:, 2 * step], x[:, 3 * step] = 2.0**15, -(2.0**15), 2.0**-12, 2.0**-14
    out = skinny_product(x.to(DEVICE), weight.to(DEVICE), SMALL, workspace)
    assert torch.equal(out.cpu(), torch.full((2, 32), 2.0**-12 + 2.0**-14))


@pytest.mark.parametrize("num_rows", [2, 24, 64])
@pytest.mark.parametrize(
    ("num_out", "num_in"), [(4096, 14336), (3584, 18944), (3584, 3584), (1536, 8960), (896, 4864)]
)
def test_programs_fill_the_chip_once(num_rows: int, num_out: int, num_in: int) -> None:
    tiling = usual_tiling(num_rows, num_out)
    assert tiling is not None
    num_tiles, num_parts = tiles_and_parts(num_out, num_in, tiling, 132)
    assert 0.9 * 132 * tiling.programs <= num_tiles * num_parts <= 132 * tiling.programs


def test_parts_end_where_there_is_nothing_to_share_out() -> None:
    """More tiles than programs are wanted, or less to read than there are programs."""
    assert tiles_and_parts(152064, 3584, SMALL, 132) == (4752, 1)
    assert tiles_and_parts(32, 96, SMALL, 132) == (1, 3)


def test_many_rows_are_left_to_others() -> None:
    assert usual_tiling(0, 64) is None and usual_tiling(129, 64) is None
