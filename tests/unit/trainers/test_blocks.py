from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from headrace.data.packing import pack
from headrace.models.packed_attention import use_packed_attention
from headrace.trainers.blocks import DecoderBlocks, layers_to_recompute
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.types import TrainBatch


@pytest.mark.parametrize(("free", "expected"), [(28_000, 0), (27_999, 2), (15_000, 16), (500, 28)])
def test_layers_are_recomputed_only_as_far_as_memory_asks(free: float, expected: int) -> None:
    """28 layers of 1000 bytes, of which an input is 100."""
    found = layers_to_recompute(10, num_layers=28, bytes_per_token=2_800.0, input_bytes=10.0, free_bytes=free)
    assert found == expected


def test_recomputed_layers_give_the_same_bits(
    make_model: Callable[..., PreTrainedModel], make_batch: Callable[..., TrainBatch]
) -> None:
    (row,) = pack(make_batch(num_samples=5).samples, row_tokens=10_000)
    tensors = row_tensors(row, device="cpu")
    found = []
    for num_recomputed in (0, 1, 2):
        model = make_model()
        use_packed_attention(model)
        names = list(model.state_dict())
        blocks = DecoderBlocks(model, compiled=False)
        blocks.num_recomputed = num_recomputed
        logprobs, _ = token_logprobs(model, tensors)
        logprobs.sum().backward()
        assert list(model.state_dict()) == names
        found.append([logprobs.detach(), *(p.grad for p in model.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
