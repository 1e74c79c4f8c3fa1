from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from headrace.data.packing import pack
from headrace.models.packed_attention import use_packed_attention
from headrace.trainers import logprobs as module
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.types import Sample, TrainBatch


def plain(model: PreTrainedModel, samples: tuple[Sample, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the loss tokens by one ordinary forward per sample."""
    logprobs, entropies = [], []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        full = (model(input_ids=ids[None], use_cache=False).logits[0] / sample.temperature).log_softmax(-1)
        for t in np.flatnonzero(sample.loss_mask):
            logprobs.append(full[t - 1, ids[t]])
            entropies.append(-(full[t - 1].exp() * full[t - 1]).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def gemma2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        final_logit_softcapping=1.5,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("chunk_elements", [32 * 4, 2**24], ids=["many-chunks", "one-chunk"])
@pytest.mark.parametrize("family", ["llama", "llama-untied", "gemma2"])
def test_values_and_gradients_equal_a_plain_forward(
    family: str,
    chunk_elements: int,
    monkeypatch: pytest.MonkeyPatch,
    make_model: Callable[..., PreTrainedModel],
    make_batch: Callable[..., TrainBatch],
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    model = gemma2() if family == "gemma2" else make_model(tied=family == "llama")
    samples = make_batch(num_samples=8).samples
    expected, expected_entropy = plain(model, samples)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (expected * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    use_packed_attention(model)
    (row,) = pack(samples, row_tokens=10_000)
    found, entropy = token_logprobs(model, row_tensors(row, device="cpu"))
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    for name, parameter in model.named_parameters():
        scale = float(gradients[name].abs().max())
        torch.testing.assert_close(
            parameter.grad, gradients[name], atol=1e-5 * max(scale, 1), rtol=0, msg=name
        )


def test_the_logits_of_a_row_are_never_held_whole(
    monkeypatch: pytest.MonkeyPatch,
    make_model: Callable[..., PreTrainedModel],
    make_batch: Callable[..., TrainBatch],
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 32 * 4)
    original, rows_seen = module._logits, []

    def watched(hidden: torch.Tensor, *rest: object) -> object:
        rows_seen.append(hidden.shape[0])
        return original(hidden, *rest)

    monkeypatch.setattr(module, "_logits", watched)
    model = make_model()
    use_packed_attention(model)
    (row,) = pack(make_batch(num_samples=8).samples, row_tokens=10_000)
    found, _ = token_logprobs(model, row_tensors(row, device="cpu"))
    found.sum().backward()
    assert found.numel() > 8 and max(rows_seen) <= 4
    assert sum(rows_seen) == 2 * found.numel()


def test_bf16_computes_the_head_in_float32(
    make_model: Callable[..., PreTrainedModel], make_batch: Callable[..., TrainBatch]
) -> None:
    model = make_model()
    samples = make_batch().samples
    expected, _ = plain(model, samples)
    use_packed_attention(model)
    (row,) = pack(samples, row_tokens=10_000)
    found, _ = token_logprobs(model, row_tensors(row, device="cpu"), compute_dtype=torch.bfloat16)
    found.sum().backward()
    assert found.dtype == torch.float32
    gap = float((found - expected).detach().abs().max())
    assert 0 < gap < 0.1
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
