"""Kernels that move or add up bytes, against torch."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from kernel_cases import DEVICE, require_kernels

require_kernels()

from headrace.kernels import many_copies  # noqa: E402
from headrace.kernels.checksum import Chunks  # noqa: E402
from headrace.kernels.many_copies import ManyCopies  # noqa: E402
from headrace.kernels.whole_copies import WholeCopies, can_be_copied_wide  # noqa: E402
from headrace.models.adapter_bank import AdapterBank  # noqa: E402
from headrace.models.loading import make_tiny_model  # noqa: E402
from headrace.models.lora import LoraSpec  # noqa: E402
from headrace.models.tensors import blobs_of  # noqa: E402


def bundle():
    """Extents of tensors in a payload, one longer than a chunk, and the sizes' sum."""
    sizes = (48, (1 << 20) + 4096 * 4 + 16, 16, 8192)
    offsets = [sum(-(-size // 64) * 64 for size in sizes[:i]) for i in range(len(sizes) + 1)]
    return list(zip(offsets, sizes, strict=False)), offsets[-1]


def test_sums_are_those_of_torch_chunk_by_chunk():
    extents, num_bytes = bundle()
    payload = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=DEVICE)
    expected = [
        int(chunk.view(torch.int32).long().sum())
        for offset, size in extents
        for chunk in payload[offset : offset + size].split(1 << 20)
    ]
    assert Chunks(extents, DEVICE).sums(payload).tolist() == expected


def test_copying_writes_the_payload_and_sums_alike():
    extents, num_bytes = bundle()
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE) for _, size in extents]
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    chunks = Chunks(extents, DEVICE)
    sums = chunks.copied_sums(sources, payload)
    for (offset, size), source in zip(extents, sources, strict=True):
        assert torch.equal(payload[offset : offset + size], source)
    assert torch.equal(sums, chunks.sums(payload))
    payload[extents[1][0] + 5] += 1
    assert not torch.equal(sums, chunks.sums(payload))


def test_a_bundle_without_tensors_has_no_sums():
    assert Chunks([], DEVICE).sums(torch.zeros(64, dtype=torch.uint8, device=DEVICE)).tolist() == []


def test_whole_copies_write_their_targets_and_nothing_between_them():
    sizes = (48, (1 << 20) + 4096 * 4 + 16, 16, 8192)
    memory = torch.zeros(sum(size + 32 for size in sizes), dtype=torch.uint8, device=DEVICE)
    starts = [sum(sizes[:i]) + 32 * i for i in range(len(sizes))]
    targets = [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    copies = WholeCopies(targets)
    for _ in range(2):
        sources = [torch.randint(1, 256, (size,), dtype=torch.uint8, device=DEVICE) for size in sizes]
        copies.copy_from(sources)
    expected = torch.zeros_like(memory)
    for start, source in zip(starts, sources, strict=True):
        expected[start : start + len(source)] = source
    assert torch.equal(memory, expected)


def test_tensors_of_odd_sizes_places_and_strides_are_not_copied_wide():
    memory = torch.zeros((8, 64), dtype=torch.uint8, device=DEVICE)
    assert can_be_copied_wide([memory, memory[2]])
    assert not can_be_copied_wide([memory, memory[0, :15]])
    assert not can_be_copied_wide([memory[0, 1:17]])
    assert not can_be_copied_wide([memory[:, :16]])


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


@pytest.mark.parametrize("width", [1, 3, 1000, 3000, 4095, 4096, 4097, 9000])
def test_many_copies_find_where_rows_end_in_every_tile(width):
    num_rows = 3 * 4096 // width + 2
    memory = torch.zeros((num_rows, width + 5), dtype=torch.bfloat16, device=DEVICE)
    source = (
        torch.arange(1, num_rows * width + 1, device=DEVICE).remainder(251).bfloat16().view(num_rows, width)
    )
    expected = torch.zeros_like(memory)
    expected[:, 2:-3] = source
    # The first is dense, and shorter than the grid that the second needs.
    dense = torch.zeros(7, dtype=torch.bfloat16, device=DEVICE)
    ManyCopies([dense, memory[:, 2:-3]]).copy_from([torch.ones_like(dense), source])
    assert torch.equal(memory, expected)
    assert dense.tolist() == [1.0] * 7


def test_a_large_tensor_does_not_make_the_grid_too_high(monkeypatch):
    """CUDA takes 65,535 programs along the second axis, and as good as any number along the first."""
    grids = []

    class Launches:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(many_copies, "_copy", Launches())
    shapes = ((1, 8), (70_000, 4096))
    views = [torch.zeros(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    ManyCopies(views).copy_from(views)
    assert grids == [(70_000, 2)]


def test_a_view_that_is_no_rows_is_refused():
    with pytest.raises(AssertionError, match="one constant stride apart"):
        ManyCopies([torch.zeros((4, 6, 8), device=DEVICE)[:, ::2, 1:3].transpose(0, 1)])


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_an_adapter_lands_alike_from_the_device_and_from_the_host(tmp_path, family):
    """Of smaller rank and without factors after one of full rank with them, and beside another that stays."""
    model = make_tiny_model(tmp_path, family=family, vocab_size=61)
    dora = family == "qwen2"
    targets = ("all-linear",) if dora else ("all-linear", "experts")
    spec = LoraSpec(rank=4, alpha=8.0, dora=dora, targets=targets)
    banks = [AdapterBank(copy.deepcopy(model).to(DEVICE), spec, 2) for _ in range(2)]
    random = torch.Generator().manual_seed(0)
    for adapter, rank, factors in ((1, 4, True), (2, 4, True), (1, 2, False), (1, 2, False)):
        tensors = {"scaling": torch.full((1,), float(rank))}
        for name, tensor in banks[0].tensors(adapter).items():
            shape = list(tensor.shape)
            if name.endswith("lora_A.weight"):
                shape[-2] = rank
            elif name.endswith("lora_B.weight"):
                shape[-1] = rank
            elif name == "scaling" or not factors:
                continue
            tensors[name] = torch.randn(shape, generator=random)
        blobs = list(blobs_of(tensors))
        banks[0].load(adapter, blobs)
        banks[1].load(adapter, [replace(b, data=torch.from_numpy(b.data).to(DEVICE)) for b in blobs])
        for place in (1, 2):
            wanted, found = (bank.tensors(place) for bank in banks)
            assert all(torch.equal(wanted[name], found[name]) for name in wanted)
