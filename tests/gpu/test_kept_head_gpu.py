"""The head over kept sets on a GPU, in bf16 with compiled parts, against a reference in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.models.kept_sets import kept_sets
from headrace.trainers.kept_head import KeptHeadLogprobs
from headrace.types import SamplingMask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
VOCAB_SIZE, HIDDEN_SIZE = 5003, 128


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("num_tokens", [700, 64, 1])
def test_values_and_gradients_follow_the_float64_reference(num_tokens: int, softcap: float | None) -> None:
    rng = np.random.default_rng(num_tokens)
    targets = rng.integers(0, VOCAB_SIZE, num_tokens)
    rows = [np.unique(np.append(rng.integers(0, VOCAB_SIZE, rng.integers(0, 900)), t)) for t in targets]
    mask = SamplingMask(
        token_ids=np.concatenate(rows).astype(np.int32), offsets=np.cumsum([0, *map(len, rows)])
    )
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(VOCAB_SIZE, HIDDEN_SIZE, device="cuda") * 0.3).bfloat16().requires_grad_()
    temperatures = torch.from_numpy(rng.choice([0.6, 1.0, 1.3], num_tokens)).float().cuda()
    upstream = torch.randn(num_tokens, device="cuda")
    found, entropy, mass = KeptHeadLogprobs.apply(
        hidden,
        weight,
        None,
        torch.from_numpy(targets).cuda(),
        temperatures,
        softcap,
        256,
        None,
        kept_sets(mask, "cuda"),
    )
    (found * upstream).sum().backward()

    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = wide[0] @ wide[1].T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits / temperatures.double()[:, None]
    is_kept = torch.zeros(num_tokens, VOCAB_SIZE, dtype=torch.bool)
    for n, row in enumerate(rows):
        is_kept[n, torch.from_numpy(row)] = True
    inside = logits.masked_fill(~is_kept.cuda(), -torch.inf).log_softmax(-1)
    right = inside.gather(1, torch.from_numpy(targets).cuda()[:, None])[:, 0]
    (right * upstream.double()).sum().backward()
    torch.testing.assert_close(found.double(), right, atol=1e-4, rtol=1e-5)
    right_entropy = -(inside.exp() * inside.masked_fill(~is_kept.cuda(), 0.0)).sum(-1)
    torch.testing.assert_close(entropy.double(), right_entropy.detach(), atol=1e-4, rtol=1e-4)
    right_mass = (logits.softmax(-1) * is_kept.cuda()).sum(-1)
    torch.testing.assert_close(mass.double(), right_mass.detach(), atol=1e-5, rtol=1e-4)
    for got, expected in ((hidden.grad, wide[0].grad), (weight.grad, wide[1].grad)):
        gap = (got.double() - expected).norm() / expected.norm().clamp(min=1e-9)
        assert float(gap) < 1e-2
    untouched = ~is_kept.any(0).cuda()
    assert torch.count_nonzero(weight.grad[untouched]) == 0
