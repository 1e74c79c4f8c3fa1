"""Tensors that lie together in blocks."""

from __future__ import annotations

import random

import pytest
import torch

from headrace.trainers.host_memory import HostMemory


class Blocks:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, num_bytes: int) -> torch.Tensor:
        self.sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)


def test_tensors_have_their_shapes_and_share_no_byte() -> None:
    chance, memory = random.Random(0), HostMemory(Blocks())
    taken = []
    for number in range(60):
        shape = [chance.randrange(1, 40) for _ in range(chance.randrange(3))]
        dtype = chance.choice((torch.float32, torch.bfloat16, torch.int64))
        tensor = memory.take(shape, dtype)
        assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype and tensor.is_contiguous()
        taken.append(tensor.fill_(number))
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(taken))


def test_a_copy_is_equal_and_another() -> None:
    own = torch.randn(5, 3)
    copied = HostMemory(Blocks()).copy_of(own)
    assert torch.equal(copied, own) and copied.data_ptr() != own.data_ptr()


def test_a_tensor_without_numbers_is_a_tensor() -> None:
    assert HostMemory(Blocks()).take((0, 4), torch.float32).shape == (0, 4)


def test_blocks_are_powers_of_two_and_grow_with_what_they_hold() -> None:
    blocks = Blocks()
    memory = HostMemory(blocks)
    for _ in range(200):
        memory.take((300,), torch.float32)
    used = 200 * 1536
    assert all(size.bit_count() == 1 for size in blocks.sizes)
    assert blocks.sizes == sorted(blocks.sizes) and len(blocks.sizes) < 12
    assert used <= sum(blocks.sizes) <= 3 * used


def test_what_is_left_of_blocks_can_be_forgotten() -> None:
    """So that a block goes with the last of its tensors."""
    blocks = Blocks()
    memory = HostMemory(blocks)
    memory.take((300,), torch.float32)
    memory.take((900,), torch.float32)
    memory.forget()
    before = list(blocks.sizes)
    memory.take((8,), torch.float32)
    assert blocks.sizes == [*before, 512] and len(memory._open) == 0


@pytest.mark.parametrize("num_moments", [1, 2])
def test_the_moments_of_large_models_take_little_more_than_their_bytes(num_moments: int) -> None:
    """Pinned one by one, those of 7B would take 116 GB instead of 61."""

    def measured(hidden: int, inner: int, narrow: int, num_words: int, *, num_heads: int) -> tuple[int, int]:
        layer = [hidden**2, narrow * hidden, narrow * hidden, hidden**2, *[inner * hidden] * 3]
        layer += [hidden, narrow, narrow, hidden, hidden]
        weights = [num_words * hidden] * num_heads + layer * 28 + [hidden]
        blocks: list[int] = []

        def new_block(num_bytes: int) -> torch.Tensor:
            blocks.append(num_bytes)
            return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

        memory = HostMemory(new_block)
        for numel in weights:
            for _ in range(num_moments):
                memory.take((numel,), torch.float32)
        return 4 * num_moments * sum(weights), sum(blocks)

    for plain, held in (
        measured(1536, 8960, 256, 151936, num_heads=1),
        measured(3584, 18944, 512, 152064, num_heads=2),
    ):
        assert plain <= held < 1.15 * plain
