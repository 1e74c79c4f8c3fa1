"""Log-probabilities over recorded kept sets, against a plain reference in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.data.packing import pack
from headrace.models.kept_sets import kept_sets
from headrace.models.packed_attention import use_packed_attention
from headrace.trainers import logprobs as module
from headrace.trainers.kept_head import KeptHeadLogprobs
from headrace.trainers.logprobs import decoder_output, head_values, row_tensors, token_logprobs
from headrace.types import Sample, SamplingMask

H, V, N = 6, 23, 9


def random_mask(
    rng: np.random.Generator, targets: np.ndarray, *, free: np.ndarray | None = None
) -> SamplingMask:
    """Sets of 1 to V ids that hold the targets; none where ``free``."""
    rows = []
    for n, target in enumerate(targets):
        if free is not None and free[n]:
            rows.append(np.zeros(0, np.int64))
            continue
        others = rng.choice(V, size=int(rng.integers(0, V)), replace=False)
        rows.append(np.unique(np.append(others, target)))
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    return SamplingMask(token_ids=np.concatenate(rows).astype(np.int32), offsets=offsets.astype(np.int64))


def plain_head(hidden, weight, bias, softcap, targets, temperatures, mask):
    """Log-probabilities, entropies and masses written out, one token at a time."""
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logprobs, entropies, masses = [], [], []
    for n, target in enumerate(targets):
        kept = mask.token_ids[mask.offsets[n] : mask.offsets[n + 1]].tolist() or list(range(V))
        scaled = logits[n] / temperatures[n]
        inside = scaled[kept].log_softmax(0)
        logprobs.append(inside[kept.index(int(target))])
        entropies.append(-(inside.exp() * inside).sum())
        masses.append(scaled.softmax(0)[kept].sum())
    return torch.stack(logprobs), torch.stack(entropies), torch.stack(masses)


@pytest.mark.parametrize("chunk", [2, 100], ids=["many-chunks", "one-chunk"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_a_plain_reference(chunk, softcap, with_bias):
    rng = np.random.default_rng(0)
    hidden = torch.from_numpy(rng.normal(size=(N, H)) / 2)
    weight = torch.from_numpy(rng.normal(size=(V, H)))
    bias = torch.from_numpy(rng.normal(size=V)) if with_bias else None
    temperatures = torch.from_numpy(rng.choice([0.4, 1.0, 1.7], N))
    targets = rng.integers(0, V, N)
    mask = random_mask(rng, targets)
    upstream = torch.from_numpy(rng.normal(size=N))
    inputs = [x.clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    biases = inputs[2] if with_bias else None
    expected = plain_head(inputs[0], inputs[1], biases, softcap, targets, temperatures, mask)
    (expected[0] * upstream).sum().backward()

    ours = [x.detach().float().requires_grad_() for x in inputs]
    found = KeptHeadLogprobs.apply(
        ours[0], ours[1], ours[2] if with_bias else None, torch.from_numpy(targets), temperatures.float(),
        softcap, chunk, None, kept_sets(mask, "cpu"),
    )  # fmt: skip
    (found[0] * upstream.float()).sum().backward()
    for right, value in zip(expected, found, strict=True):
        torch.testing.assert_close(value.double(), right.detach(), atol=5e-6, rtol=5e-6)
    for right, tensor in zip(inputs, ours, strict=True):
        torch.testing.assert_close(tensor.grad.double(), right.grad, atol=2e-5, rtol=2e-5)


def test_the_reference_itself_agrees_with_finite_differences():
    rng = np.random.default_rng(1)
    weight = torch.from_numpy(rng.normal(size=(V, H))).requires_grad_()
    hidden = torch.from_numpy(rng.normal(size=(N, H))).requires_grad_()
    bias = torch.from_numpy(rng.normal(size=V)).requires_grad_()
    targets = rng.integers(0, V, N)
    mask, temperatures = random_mask(rng, targets), torch.from_numpy(rng.uniform(0.5, 1.5, N))
    torch.autograd.gradcheck(
        lambda *given: plain_head(*given, 2.0, targets, temperatures, mask)[0], (hidden, weight, bias)
    )


def test_finite_differences_of_the_head():
    """Central differences over the float32 head itself, with a step far above its rounding."""
    rng = np.random.default_rng(2)
    targets = rng.integers(0, V, N)
    sets, temperatures = kept_sets(random_mask(rng, targets), "cpu"), torch.full((N,), 0.8)
    weight = torch.from_numpy(rng.normal(size=(V, H))).float()
    hidden = torch.from_numpy(rng.normal(size=(N, H))).float().requires_grad_()

    def total(given: torch.Tensor) -> torch.Tensor:
        arguments = (weight, None, torch.from_numpy(targets), temperatures, None, 4, None, sets)
        return KeptHeadLogprobs.apply(given, *arguments)[0].double().sum()

    total(hidden).backward()
    step = 1e-2
    for n, h in [(0, 0), (3, 2), (8, 5)]:
        moved = torch.zeros(N, H)
        moved[n, h] = step
        slope = float(total(hidden.detach() + moved) - total(hidden.detach() - moved)) / (2 * step)
        assert float(hidden.grad[n, h]) == pytest.approx(slope, abs=2e-3)


def test_tokens_outside_the_sets_get_no_gradient_at_all():
    rng = np.random.default_rng(3)
    targets = np.array([4, 4, 7])
    mask = SamplingMask(
        token_ids=np.array([2, 4, 4, 9, 7], np.int32), offsets=np.array([0, 2, 4, 5], np.int64)
    )
    weight = torch.from_numpy(rng.normal(size=(V, H))).float().requires_grad_()
    bias = torch.zeros(V, requires_grad=True)
    hidden = torch.from_numpy(rng.normal(size=(3, H))).float().requires_grad_()
    logprobs, entropy, _ = KeptHeadLogprobs.apply(
        hidden, weight, bias, torch.from_numpy(targets), torch.ones(3), None, 2, None, kept_sets(mask, "cpu")
    )
    (logprobs * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
    outside = [v for v in range(V) if v not in (2, 4, 9)]
    assert torch.count_nonzero(bias.grad[outside]) == 0
    assert torch.count_nonzero(weight.grad[outside]) == 0
    assert bool((bias.grad[[2, 4, 9]] != 0).all())
    # A set of one token leaves nothing to choose.
    assert (
        float(logprobs[2].detach()) == 0
        and float(entropy[2]) == 0
        and torch.count_nonzero(hidden.grad[2]) == 0
    )


def with_masks(samples: tuple[Sample, ...], free_share: float, seed: int = 0) -> tuple[Sample, ...]:
    rng = np.random.default_rng(seed)
    done = []
    for sample in samples:
        free = ~sample.loss_mask | (rng.random(sample.num_tokens) < free_share)
        done.append(replace(sample, sampling_mask=random_mask(rng, sample.token_ids % V, free=free)))
    return tuple([replace(s, token_ids=(s.token_ids % V).astype(np.int32)) for s in done])


@pytest.mark.parametrize("free_share", [0.0, 0.4, 1.0], ids=["all-cut", "mixed", "none-cut"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_row_equals_a_plain_forward(free_share, tied, monkeypatch, make_model, make_batch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 32 * 4)
    model = make_model(tied=tied)
    use_packed_attention(model)
    samples = with_masks(make_batch(num_samples=6).samples, free_share)
    (row,) = pack(samples, row_tokens=10_000)
    tensors = row_tensors(row, device="cpu")
    values = head_values(model, tensors)
    upstream = torch.randn(values.logprobs_N.shape, generator=torch.Generator().manual_seed(0))
    (values.logprobs_N * upstream).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    rows = [mask_row(samples, row, t) for t in np.flatnonzero(row.loss_mask)]
    logits = decoder_output(model, tensors)[tensors.predictors_N] @ model.get_output_embeddings().weight.T
    expected = []
    for n, kept in enumerate(rows):
        scaled = logits[n] / tensors.temperatures_N[n]
        kept = kept if len(kept) else np.arange(32)
        expected.append(scaled[tensors.targets_N[n]] - scaled[torch.from_numpy(kept)].logsumexp(0))
    (torch.stack(expected) * upstream).sum().backward()
    torch.testing.assert_close(values.logprobs_N, torch.stack(expected), atol=1e-5, rtol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-5, msg=name)
    if free_share == 1.0:
        plain, _ = token_logprobs(model, replace(tensors, kept=None))
        torch.testing.assert_close(values.logprobs_N, plain, atol=0, rtol=0)
    assert values.kept_mass_N is not None
    cut = np.array([len(kept) > 0 for kept in rows])
    assert values.kept_mass_N.isnan().numpy().tolist() == (~cut).tolist()


def mask_row(samples, row, position: int) -> np.ndarray:
    """The kept ids of a token of a packed row, looked up in its sample."""
    sample = samples[int(row.sample_index[row.sequence[position]])]
    mask, t = sample.sampling_mask, int(row.position_ids[position])
    return mask.token_ids[mask.offsets[t] : mask.offsets[t + 1]].astype(np.int64)


def test_a_shared_prompt_keeps_every_continuations_own_sets(make_model):
    rng = np.random.default_rng(5)
    samples = []
    prompt_ids = rng.integers(0, V, 12)
    for attempt, length in enumerate([5, 9, 2, 7]):
        ids = np.concatenate([prompt_ids, rng.integers(0, V, length)]).astype(np.int32)
        sampled = np.arange(len(ids)) >= 12
        zeros = np.zeros(len(ids), np.float32)
        samples.append(
            Sample(
                group=0, attempt=attempt, token_ids=ids, loss_mask=sampled, behavior_logprobs=zeros,
                versions=zeros.astype(np.int32), advantages=zeros, temperature=0.9,
                kv_versions=np.zeros((0, 2), np.int32), sampling_mask=random_mask(rng, ids, free=~sampled),
            )
        )  # fmt: skip
    # One attempt at the same task may have been drawn from the whole vocabulary.
    samples.append(replace(samples[1], attempt=4, sampling_mask=None))
    model = make_model()
    use_packed_attention(model)
    found = {}
    for share in (False, True):
        (row,) = pack(samples, row_tokens=10_000, share_prefixes=share)
        assert bool((row.parents >= 0).any()) is share
        tensors = row_tensors(row, device="cpu")
        logprobs, _ = token_logprobs(model, tensors)
        for place, index in enumerate(row.sample_index):
            found[share, int(index)] = logprobs[tensors.sequence_N == place]
    for index in range(len(samples)):
        torch.testing.assert_close(found[True, index], found[False, index], atol=1e-5, rtol=0)
    assert float((found[True, 1] - found[True, 4]).detach().abs().max()) > 1e-2


def test_bfloat16_weights_are_valued_in_float32():
    rng = np.random.default_rng(6)
    targets = rng.integers(0, V, N)
    mask = random_mask(rng, targets)
    weight = torch.from_numpy(rng.normal(size=(V, H))).bfloat16().requires_grad_()
    hidden = torch.from_numpy(rng.normal(size=(N, H))).bfloat16().requires_grad_()
    found = KeptHeadLogprobs.apply(
        hidden, weight, None, torch.from_numpy(targets), torch.ones(N), None, 4, None, kept_sets(mask, "cpu")
    )
    expected = plain_head(
        hidden.detach().double(), weight.detach().double(), None, None, targets, torch.ones(N), mask
    )
    torch.testing.assert_close(found[0].double(), expected[0], atol=2e-6, rtol=2e-6)
    found[0].sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_a_masters_gradient_takes_the_heads_own() -> None:
    rng = np.random.default_rng(5)
    targets = rng.integers(0, V, N)
    sets = kept_sets(random_mask(rng, targets), "cpu")
    weight = torch.from_numpy(rng.normal(size=(V, H))).float().requires_grad_()
    master = weight.detach().clone().requires_grad_()
    hidden = torch.from_numpy(rng.normal(size=(N, H))).float()
    for given in (None, master):
        KeptHeadLogprobs.apply(
            hidden, weight, None, torch.from_numpy(targets), torch.ones(N), None, 4, given, sets
        )[0].sum().backward()
    torch.testing.assert_close(master.grad, weight.grad)
