"""Log-probabilities of many given tokens at each place, against a plain forward pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_logprobs import gemma2

from headrace.data.packing import pack
from headrace.models.packed_attention import use_packed_attention
from headrace.trainers import logprobs as module
from headrace.trainers.head_at_ids import logprobs_at
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.trainers.whole_head import HeadLogprobs


def plain(model, samples, ids_NA):
    """[N, A] by one ordinary forward per sample."""
    rows, places = [], iter(ids_NA)
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        full = (model(input_ids=ids[None], use_cache=False).logits[0] / sample.temperature).log_softmax(-1)
        rows += [full[t - 1, next(places)] for t in np.flatnonzero(sample.loss_mask)]
    return torch.stack(rows)


@pytest.mark.parametrize("chunk_elements", [32 * 4, 2**24], ids=["many-chunks", "one-chunk"])
@pytest.mark.parametrize("family", ["llama", "llama-untied", "gemma2"])
def test_values_and_gradients_equal_a_plain_forward(
    family, chunk_elements, monkeypatch, make_model, make_batch
):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    model = gemma2() if family == "gemma2" else make_model(tied=family == "llama")
    samples = make_batch(num_samples=8).samples
    num_tokens = sum(sample.num_loss_tokens for sample in samples)
    draw = torch.Generator().manual_seed(0)
    # With repetition: an id may stand in a row twice.
    ids_NA = torch.randint(0, 32, (num_tokens, 6), generator=draw)
    weights = torch.randn(ids_NA.shape, generator=draw)
    expected = plain(model, samples, ids_NA)
    (expected * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    use_packed_attention(model)
    (row,) = pack(samples, row_tokens=10_000)
    tensors = row_tensors(row, device="cpu")
    found, entropy = logprobs_at(model, tensors, ids_NA)
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, token_logprobs(model, tensors)[1])
    for name, parameter in model.named_parameters():
        scale = float(gradients[name].abs().max())
        torch.testing.assert_close(
            parameter.grad, gradients[name], atol=1e-5 * max(scale, 1), rtol=0, msg=name
        )


def test_the_logits_of_a_row_are_never_held_whole():
    """Nothing of the size of [tokens, vocabulary] is kept for the backward."""
    hidden_NH = torch.randn(64, 8, requires_grad=True)
    weight_VH = torch.randn(1000, 8, requires_grad=True)
    sizes = []

    def pack_hook(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        logprobs_NA, _ = HeadLogprobs.apply(
            hidden_NH, weight_VH, None, torch.randint(0, 1000, (64, 3)), torch.ones(64), None, 4, None
        )
        logprobs_NA.sum().backward()
    assert max(sizes) <= weight_VH.numel() < 64 * 1000
