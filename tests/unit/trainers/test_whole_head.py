"""The head's gradients are those of a softmax in float64, however many slopes its forward keeps."""

from __future__ import annotations

import pytest
import torch

from headrace.trainers.whole_head import HeadLogprobs

NUM_TOKENS, HIDDEN, VOCAB, CHUNK = 13, 8, 23, 4


def plain(hidden, weight, bias, ids, temperatures, softcap):
    logits = hidden @ weight.T + bias
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    logprobs = torch.log_softmax(logits / temperatures.double()[:, None], -1)
    return logprobs.gather(1, ids if ids.dim() == 2 else ids[:, None]).view(ids.shape)


@pytest.mark.parametrize("weight_is", ["trained", "frozen", "mastered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("num_ids", [None, 3])
@pytest.mark.parametrize("kept_tokens", [0, 1, 6, 100])
def test_gradients_do_not_depend_on_what_is_kept(kept_tokens, num_ids, softcap, dtype, weight_is):
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    hidden, weight, bias = (normal(*s).to(dtype) for s in ((NUM_TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)))
    ids = torch.randint(VOCAB, (NUM_TOKENS,) if num_ids is None else (NUM_TOKENS, num_ids), generator=random)
    temperatures, grad = normal(NUM_TOKENS).abs() + 0.5, normal(*ids.shape)
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias)]
    plain(*exact, ids, temperatures, softcap).backward(grad.double())

    hidden.requires_grad_()
    weight.requires_grad_(weight_is != "frozen")
    bias.requires_grad_(weight_is != "frozen")
    master = torch.zeros(VOCAB, HIDDEN) if weight_is == "mastered" else None
    found, _ = HeadLogprobs.apply(
        hidden, weight, bias, ids, temperatures, softcap, CHUNK, master, kept_tokens
    )
    # The second backward finds no slopes left and makes them anew.
    for _ in range(2):
        found.backward(grad, retain_graph=True)
    summed = [hidden.grad, weight.grad if master is None else master.grad, bias.grad]
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for got, wanted in zip(summed, exact, strict=True):
        if got is None:
            assert weight_is == "frozen"
        else:
            twice = 2 * wanted.grad
            assert float((got.double() - twice).norm() / twice.norm()) < tolerance
    assert (weight.grad is None) == (weight_is != "trained")
