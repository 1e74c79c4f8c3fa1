from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from headrace.data.packing import pack
from headrace.models.packed_attention import use_packed_attention
from headrace.trainers import head, whole_head
from headrace.trainers import logprobs as module
from headrace.trainers.logprobs import decoder_output, row_tensors, token_logprobs
from headrace.trainers.master_weights import MasterWeights
from headrace.types import NO_KV, Sample, TrainBatch


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


@pytest.mark.parametrize("slopes", [0, 10, 10_000], ids=["no-slopes", "some-slopes", "all-slopes"])
@pytest.mark.parametrize("chunk_elements", [32 * 4, 2**24], ids=["many-chunks", "one-chunk"])
@pytest.mark.parametrize("family", ["llama", "llama-untied", "gemma2"])
def test_values_and_gradients_equal_a_plain_forward(
    family: str,
    chunk_elements: int,
    slopes: int,
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
    found, entropy = token_logprobs(model, replace(row_tensors(row, device="cpu"), slope_tokens=slopes))
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    for name, parameter in model.named_parameters():
        scale = float(gradients[name].abs().max())
        torch.testing.assert_close(
            parameter.grad, gradients[name], atol=1e-5 * max(scale, 1), rtol=0, msg=name
        )


@pytest.mark.parametrize("slopes", [0, 10, 10_000])
def test_the_logits_of_a_row_are_never_held_whole(
    slopes: int,
    monkeypatch: pytest.MonkeyPatch,
    make_model: Callable[..., PreTrainedModel],
    make_batch: Callable[..., TrainBatch],
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 32 * 4)
    original, rows_seen = whole_head.uncapped_logits, []

    def watched(hidden: torch.Tensor, *rest: object) -> object:
        rows_seen.append(hidden.shape[0])
        return original(hidden, *rest)

    monkeypatch.setattr(whole_head, "uncapped_logits", watched)
    model = make_model()
    use_packed_attention(model)
    (row,) = pack(make_batch(num_samples=8).samples, row_tokens=10_000)
    tensors = replace(row_tensors(row, device="cpu"), slope_tokens=slopes)
    found, _ = token_logprobs(model, tensors)
    found.sum().backward()
    assert found.numel() > 12 and max(rows_seen) <= 4
    num_kept = 2 * found.numel() - sum(rows_seen)
    # In whole chunks, as many as there may be.
    most = min(slopes, found.numel())
    assert num_kept == 0 if not slopes else most - 4 < num_kept <= most
    known = module.kept_slope_bytes(tensors, model.get_output_embeddings().weight) / (32 * 4)
    assert num_kept - 4 < known <= num_kept


def test_bf16_computes_the_head_in_float32(
    make_model: Callable[..., PreTrainedModel], make_batch: Callable[..., TrainBatch]
) -> None:
    model = make_model()
    samples = make_batch().samples
    expected, _ = plain(model, samples)
    policy = MasterWeights(model, torch.bfloat16).policy
    use_packed_attention(policy)
    (row,) = pack(samples, row_tokens=10_000)
    tensors = row_tensors(row, device="cpu")
    found, _ = token_logprobs(policy, tensors)
    found.sum().backward()
    assert found.dtype == torch.float32
    gap = float((found - expected).detach().abs().max())
    assert 0 < gap < 0.1
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())

    hidden = decoder_output(policy, tensors).detach()[tensors.predictors_N].float()
    logits = hidden @ policy.lm_head.weight.detach().float().T / tensors.temperatures_N[:, None]
    by_hand = logits.log_softmax(-1).gather(1, tensors.targets_N[:, None])[:, 0]
    torch.testing.assert_close(found.detach(), by_hand, atol=1e-5, rtol=0)


def group_samples(rng: np.random.Generator, group: int, prompt: int, sampled: list[int]) -> list[Sample]:
    """Attempts at one task: one prompt, different completions."""
    prompt_ids = rng.integers(0, 32, prompt)
    samples = []
    for attempt, length in enumerate(sampled):
        num_tokens = prompt + length
        samples.append(
            Sample(
                group=group,
                attempt=attempt,
                token_ids=np.concatenate([prompt_ids, rng.integers(0, 32, length)]).astype(np.int32),
                loss_mask=np.arange(num_tokens) >= prompt,
                behavior_logprobs=np.zeros(num_tokens, dtype=np.float32),
                versions=np.zeros(num_tokens, dtype=np.int32),
                advantages=np.zeros(num_tokens, dtype=np.float32),
                temperature=1.0,
                kv_versions=NO_KV,
            )
        )
    return samples


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_shared_prompt_gives_the_values_and_gradients_of_an_unshared_one(
    family: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    """Gemma's windows reach back into the prompt, so positions and prefix must both be right."""
    model = gemma2() if family == "gemma2" else make_model()
    use_packed_attention(model)
    rng = np.random.default_rng(0)
    samples = [
        *group_samples(rng, 0, 9, [4, 11, 1]),
        *group_samples(rng, 1, 6, [5]),
        *group_samples(rng, 2, 12, [7, 3, 3, 8]),
        *group_samples(rng, 3, 1, [4, 2]),
    ]
    weights = {(s.group, s.attempt): torch.from_numpy(rng.normal(size=40)).float() for s in samples}

    def run(share: bool) -> tuple[dict[tuple[int, int], torch.Tensor], dict[str, torch.Tensor], int]:
        (row,) = pack(samples, row_tokens=10_000, share_prefixes=share)
        tensors = row_tensors(row, device="cpu")
        found, _ = token_logprobs(model, tensors)
        values, total = {}, torch.zeros(())
        for place, index in enumerate(row.sample_index):
            key = (samples[index].group, samples[index].attempt)
            values[key] = found[tensors.sequence_N == place]
            total = total + (values[key] * weights[key][: values[key].numel()]).sum()
        total.backward()
        gradients = {name: p.grad.double() for name, p in model.named_parameters()}
        model.zero_grad()
        return values, gradients, row.num_tokens

    values, gradients, num_tokens = run(share=False)
    shared_values, shared_gradients, shared_tokens = run(share=True)
    assert shared_tokens == num_tokens - 2 * 8 - 3 * 11
    for key, value in values.items():
        torch.testing.assert_close(shared_values[key], value, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        gap = float((shared_gradients[name] - gradient).norm() / gradient.norm())
        assert gap < 1e-5, (name, gap)


@pytest.mark.parametrize("tied", [True, False])
def test_a_narrow_head_adds_its_gradient_to_the_master_in_float32(
    tied: bool,
    monkeypatch: pytest.MonkeyPatch,
    make_model: Callable[..., PreTrainedModel],
    make_batch: Callable[..., TrainBatch],
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 32 * 4)
    model = make_model(tied=tied)
    masters = MasterWeights(model, torch.bfloat16)
    use_packed_attention(masters.policy)
    (row,) = pack(make_batch().samples, row_tokens=10_000)
    tensors = row_tensors(row, device="cpu")
    found, _ = token_logprobs(masters.policy, tensors)
    found.sum().backward()
    own = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for _ in range(2):
        found = masters.values(tensors).logprobs_N
        found.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, 2 * own[name], atol=2e-2, rtol=2e-2, msg=name)
    head = model.get_output_embeddings().weight.grad
    if not tied:
        assert not torch.equal(head, head.to(torch.bfloat16).float()), "it was rounded on the way"
    assert all(parameter.grad is None for parameter in masters.policy.parameters())


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 9, 16, 17, 100])
def test_chunks_are_as_few_and_as_even_as_can_be(num_tokens: int) -> None:
    chunks = head.chunks(num_tokens, 8)
    lengths = [len(range(num_tokens)[chunk]) for chunk in chunks]
    assert sum(lengths) == num_tokens and len(chunks) == -(-num_tokens // 8)
    assert all(length <= 8 for length in lengths) and 0 not in lengths
