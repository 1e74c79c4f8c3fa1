"""Products added to a running sum against float64, whatever the edges of their tiles cut off."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, HALF, require_kernels

require_kernels()

from headrace.kernels.added_product import MOST_TILES, add_product, is_quick, parts_to_fill  # noqa: E402


# One part, several, more than there are steps for, and edges within a tile on every side.
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(128, 512), (1024, 128), (384, 64), (520, 200)])
@pytest.mark.parametrize("num_rows", [1, 16, 19, 32, 50])
def test_a_product_is_added_unrounded_and_the_counters_are_zero_again(num_rows, num_inputs, num_outputs):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((num_rows, num_inputs), generator=generator).to(HALF)
    weight = (torch.randn((num_outputs, num_inputs), generator=generator) * num_inputs**-0.5).to(HALF)
    total = torch.randn((num_rows, num_outputs), generator=generator)
    expected = total.double() + x.double() @ weight.double().T
    arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=DEVICE)
    # What lies behind the sum is nobody's to change: not even zeros are added, which a negative zero would show.
    memory = torch.full((num_rows + 1, num_outputs), -0.0, device=DEVICE)
    for _ in range(2):
        memory[:num_rows] = total.to(DEVICE)
        add_product(memory[:num_rows], x.to(DEVICE), weight.to(DEVICE), arrived)
        # Were it rounded on its way, it would be 1e-4 of float16 and 1e-3 of bfloat16.
        assert (memory[:num_rows].cpu().double() - expected).norm() / expected.norm() < 2e-6
        assert not arrived.any() and bool(memory[num_rows].signbit().all())


# Of 7B's two products, 1.5B's, and of more tiles than multiprocessors.
@pytest.mark.parametrize(
    ("num_tiles", "num_steps", "parts"), [(56, 148, 2), (56, 28, 2), (24, 70, 5), (14, 7, 3), (200, 70, 1)]
)
def test_inputs_are_split_until_the_chip_is_full(num_tiles, num_steps, parts):
    assert parts_to_fill(num_tiles, num_steps, 132) == parts


@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "most_rows"),
    [(3584, 3584, 32), (18944, 3584, 64), (8960, 1536, 0), (18943, 3584, 0)],
    ids=["7B, output", "7B, down", "1.5B, down", "rows that begin anywhere"],
)
def test_it_is_used_for_as_many_rows_as_it_was_quicker_for(num_inputs, num_outputs, most_rows):
    weight = torch.empty((num_outputs, num_inputs), dtype=torch.bfloat16, device="meta")
    quick = [n for n in range(100) if is_quick(weight.new_empty((n, num_inputs)), weight)]
    assert quick == list(range(1, most_rows + 1))


def test_sums_that_are_not_dense_are_refused():
    total = torch.zeros((2, 300), device=DEVICE)[:, :200]
    x, weight = torch.zeros((2, 64), device=DEVICE), torch.zeros((200, 64), device=DEVICE)
    with pytest.raises(AssertionError):
        add_product(total, x, weight, torch.zeros(MOST_TILES, dtype=torch.int32, device=DEVICE))
