"""Kernels that move or add up bytes, against torch."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, require_kernels

require_kernels()

from headrace.kernels.checksum import chunk_sums  # noqa: E402
from headrace.kernels.many_copies import ManyCopies  # noqa: E402


@pytest.mark.parametrize("num_words", [0, 5, 8192, 20_000])
def test_chunk_sums_are_those_of_torch(num_words):
    words = torch.randint(-(2**31), 2**31, (num_words,), dtype=torch.int32, device=DEVICE)
    expected = [chunk.long().sum().item() for chunk in words.split(8192)] if num_words else []
    assert chunk_sums(words, 8192).tolist() == expected


def parts_of(memory):
    """Rows, columns, rows of every expert, columns of every expert, part of a row."""
    return [memory[0][4:8], memory[1][2:7, 4:8], memory[2][:, 2:4], memory[3][:, :, 4:8], memory[1][0, :3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_copies_write_their_views_and_nothing_else(dtype):
    shapes = ((12, 70), (9, 12), (3, 8, 10), (3, 6, 8))
    memory = [torch.zeros(shape, dtype=dtype, device=DEVICE) for shape in shapes]
    expected = [tensor.clone() for tensor in memory]
    views, places = parts_of(memory), parts_of(expected)
    sources = [torch.randn(view.shape, device=DEVICE).to(dtype) for view in views]
    for place, source in zip(places, sources, strict=True):
        place.copy_(source)
    copies = ManyCopies(views)
    copies.copy_from([torch.randn_like(source) for source in sources])
    copies.copy_from(sources)
    for found, wanted in zip(memory, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_view_that_is_no_rows_is_refused():
    with pytest.raises(AssertionError, match="one constant stride apart"):
        ManyCopies([torch.zeros((4, 6, 8), device=DEVICE)[:, ::2, 1:3].transpose(0, 1)])
