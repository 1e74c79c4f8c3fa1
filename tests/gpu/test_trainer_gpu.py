"""The trainer's GPU path against float32 references on fresh random inputs, by relative error."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Gemma2Config, PreTrainedModel, Qwen2Config

from headrace.bench.shapes import build_random_model
from headrace.bench.step_workload import StepWorkload
from headrace.bench.train import random_samples
from headrace.data.packing import pack
from headrace.memory.architecture import examine
from headrace.models import flash
from headrace.models.float_residual import keep_float_residual
from headrace.models.gated_layer import join_gates
from headrace.models.joined_linear import QUERY_KEY_VALUE, join_linears
from headrace.models.packed_attention import use_packed_attention
from headrace.models.shared_prefix import segment_attention, segment_bounds
from headrace.models.turned_heads import turn_heads, turned_forward
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.blocks import DecoderBlocks
from headrace.trainers.head import add_head_weight_gradient, head_input_gradient, head_logits
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.trainers.master_weights import MasterWeights
from headrace.trainers.placement import HOST_MOMENTS, Offload
from headrace.trainers.streamed_adamw import StreamedAdamW
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.trainers.whole_head import HeadLogprobs
from headrace.types import TrainBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

ROWS = {
    "plain": ([300, 17, 129, 1], [-1] * 4),
    "shared": ([130, 64, 200, 7, 128, 33, 90], [-1, -1, 0, 0, 0, 1, -1]),
}


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], parents: list[int],
    window: int | None,
) -> torch.Tensor:  # fmt: skip
    segment = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).cuda()
    parent = torch.tensor(parents).cuda()[segment]
    before = torch.tensor([0 if parent < 0 else lengths[parent] for parent in parents]).cuda()[segment]
    place = before + torch.cat([torch.arange(length) for length in lengths]).cuda()
    gap = place[:, None] - place[None, :]
    mine = (segment[:, None] == segment[None, :]) | (parent[:, None] == segment[None, :])
    seen = mine & (gap >= 0) & (gap < (window or 10**9))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize(
    ("row", "window"),
    [("plain", None), ("plain", 20), ("shared", None), ("shared", 20)],
    ids=["plain", "window", "shared", "window-shared"],
)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (12, 2, 128), (4, 4, 80), (4, 1, 256)])
@pytest.mark.parametrize("kernels", ["torch", "flash-attn-4"])
def test_attention_over_segments(
    row: str, window: int | None, heads: int, kv_heads: int, size: int, kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if kernels == "torch":
        monkeypatch.setattr(flash, "fast_kernels", lambda *_: None)
    elif flash.fast_kernels(torch.device("cuda", 0), size) is None:
        pytest.skip("flash-attn-4 is not installed, or not made for this")
    lengths, parents = ROWS[row]
    inputs = [
        torch.randn(sum(lengths), n, size, device="cuda").to(torch.bfloat16).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]
    weights = torch.randn(sum(lengths), heads, size, device="cuda").to(torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    right = masked_attention(*wide, lengths, parents, window)
    right_grads = torch.autograd.grad((right * weights).sum(), wide)
    bounds = segment_bounds(lengths, parents, device="cuda")
    found = segment_attention(*inputs, bounds, scale=size**-0.5, window=window)
    assert relative(found, right) < 1e-2
    for grad, right_grad in zip(torch.autograd.grad(found, inputs, weights), right_grads, strict=True):
        assert relative(grad, right_grad) < 1e-2


def test_head_products() -> None:
    hidden, weight = (torch.randn(n, 64, device="cuda").to(torch.bfloat16) for n in (100, 1000))
    grad = torch.randn(100, 1000, device="cuda").to(torch.bfloat16)
    logits = head_logits(hidden, weight)
    assert logits.dtype == torch.float32
    assert relative(logits, hidden.double() @ weight.double().T) < 1e-6
    assert relative(head_input_gradient(grad, weight), grad.double() @ weight.double()) < 1e-2
    total = torch.randn(1000, 64, device="cuda")
    right = total.double() + grad.double().T @ hidden.double()
    add_head_weight_gradient(total, grad, hidden)
    assert relative(total, right) < 1e-6


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("ids_shape", [(), (5,)], ids=["one", "several"])
def test_head_values_and_gradients_follow_the_float64_reference(
    ids_shape: tuple[int, ...], softcap: float | None
) -> None:
    """Over three chunks, of which two are kept, and a vocabulary that is no multiple of anything: the second kept chunk
    begins at an odd address."""
    num_tokens, vocab_size = 700, 5003
    hidden = torch.randn(num_tokens, 128, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocab_size, 128, device="cuda") * 0.3).bfloat16().requires_grad_()
    bias = torch.randn(vocab_size, device="cuda").bfloat16().requires_grad_()
    temperatures = 0.5 + torch.rand(num_tokens, device="cuda")
    ids = torch.randint(0, vocab_size, (num_tokens, *ids_shape), device="cuda")
    upstream = torch.randn(ids.shape, device="cuda")
    found, entropy = HeadLogprobs.apply(hidden, weight, bias, ids, temperatures, softcap, 256, None, 500)
    grads = torch.autograd.grad((found * upstream).sum(), (hidden, weight, bias))

    wide = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    logits = wide[0] @ wide[1].T + wide[2]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    whole = (logits / temperatures.double()[:, None]).log_softmax(-1)
    right = whole.gather(1, ids.view(num_tokens, -1)).view(ids.shape)
    right_grads = torch.autograd.grad((right * upstream).sum(), wide)
    assert relative(found.detach(), right.detach()) < 5e-6
    assert relative(entropy, -(whole.exp() * whole).sum(-1).detach()) < 5e-6
    for grad, right_grad in zip(grads, right_grads, strict=True):
        assert relative(grad, right_grad) < 1e-2


def small_model(family: str = "qwen2") -> PreTrainedModel:
    if family == "gemma2":
        config = Gemma2Config(
            vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=16,
            attn_logit_softcapping=20.0, final_logit_softcapping=20.0, initializer_range=0.06,
        )  # fmt: skip
        return build_random_model(config, device="cuda", dtype=torch.float32)
    config = Qwen2Config(
        vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.06,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return build_random_model(config, device="cuda", dtype=torch.float32)


@pytest.mark.parametrize("heads", ["apart", "joined", "turned"])
@pytest.mark.parametrize(
    ("family", "share", "compiled"),
    [
        ("qwen2", False, False),
        ("qwen2", True, False),
        ("qwen2", False, True),
        ("qwen2", True, True),
        ("gemma2", True, True),
    ],
)
def test_values_and_gradients_follow_the_float32_reference(
    family: str, share: bool, compiled: bool, heads: str
) -> None:
    model = small_model(family)
    samples = random_samples(
        StepWorkload(num_groups=3, group_size=4, prompt_tokens=40, completion_tokens=25), vocab_size=500
    )
    (row,) = pack(samples, row_tokens=10_000, share_prefixes=share)
    tensors = row_tensors(row, device="cuda")
    keep_float_residual(model)
    reference = MasterWeights(model, torch.bfloat16)
    use_packed_attention(model)
    right, _ = token_logprobs(model, tensors)
    weights = torch.randn_like(right)
    (right * weights).sum().backward()
    right_grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    use_packed_attention(reference.policy)
    if heads != "apart":
        join_linears(reference.policy, (QUERY_KEY_VALUE,))
        join_gates(reference.policy)
    if heads == "turned":
        assert turn_heads(reference.policy) == (3 if family == "qwen2" else 0)
    blocks = DecoderBlocks(reference.policy, compiled=compiled)
    for num_recomputed in (0, 2):
        blocks.num_recomputed = num_recomputed
        found = reference.values(tensors).logprobs_N
        (found * weights).sum().backward()
        assert float((found - right).abs().mean()) < 0.02
        for name, parameter in model.named_parameters():
            assert relative(parameter.grad, right_grads[name]) < 0.06, name
        model.zero_grad()


class NoSender:
    def send(self, *_: Any) -> NoReturn:
        raise NotImplementedError

    def retire(self, version: int) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("offload", ["none", "first_moments", "moments"])
def test_a_checkpoint_restores_weights_moments_and_policy(tmp_path: Path, offload: Offload) -> None:
    samples = random_samples(
        StepWorkload(num_groups=2, group_size=4, prompt_tokens=20, completion_tokens=10), vocab_size=500
    )

    def build() -> TorchTrainer:
        ledger = TimeLedger(TRAINER_ACTIVITIES)
        return TorchTrainer(
            small_model(),
            sender=NoSender(),
            ledger=ledger,
            compute_dtype="bf16",
            learning_rate=1e-3,
            eager=True,
            offload=offload,
        )

    first, second = build(), build()
    for step in (1, 2):
        fresh = [replace(s, versions=np.where(s.loss_mask, step - 1, -1).astype(np.int32)) for s in samples]
        result = first.step(TrainBatch(step=step, version=step - 1, samples=tuple(fresh)))
        assert (
            result.skipped is None and 0 < result.metrics["mismatch_mean"] <= result.metrics["mismatch_p99"]
        )
    first.save(tmp_path)
    assert second.load(tmp_path) == 2
    for one, other in ((first.model, second.model), (first.policy, second.policy)):
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name
    states = zip(first.model.parameters(), second.model.parameters(), strict=True)
    for mine, other in states:
        for key, value in first.optimizer.state[mine].items():
            restored = second.optimizer.state[other][key]
            assert torch.equal(value, restored)
            on_host = key in HOST_MOMENTS.get(offload, ())
            assert restored.is_pinned() == value.is_pinned() == on_host and value.is_cuda != on_host


@pytest.mark.parametrize("on_host", HOST_MOMENTS.values(), ids=HOST_MOMENTS)
@pytest.mark.parametrize("num_brought", [0, 2, 5, 100])
def test_streamed_moments_give_the_bits_of_moments_on_the_gpu(
    num_brought: int, on_host: tuple[str, ...]
) -> None:
    """Pieces outnumber slots, so that each slot is used again while copies are under way; and what leaves in one step
    is still under way when the next begins."""
    shapes = [(1000, 333), (4096,), (777, 512), (50,), (2000, 1000)]
    plain, streamed = ([nn.Parameter(torch.empty(s, device="cuda")) for s in shapes] for _ in range(2))
    with torch.no_grad():
        for one, other in zip(plain, streamed, strict=True):
            other.copy_(one.normal_())
    first = torch.optim.AdamW(plain, fused=True, lr=0.01, weight_decay=0.1)
    second = StreamedAdamW(streamed, piece_numel=2**18, on_host=on_host, lr=0.01, weight_decay=0.1)
    for _ in range(5):
        for one, other in zip(plain, streamed, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for part in (num_brought // 2, num_brought):
            second.bring(part * 2**18 * 4 * len(on_host))
        first.step()
        second.step()
    second.settle()
    for one, other in zip(plain, streamed, strict=True):
        assert torch.equal(one, other)
        for key, value in first.state[one].items():
            assert torch.equal(value.cpu(), second.state[other][key].cpu()), key


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("offload", HOST_MOMENTS)
def test_moments_come_while_compiled_layers_compute_backwards(
    offload: Offload, num_minibatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer with all moments on the GPU is given the very same gradients."""
    config = Qwen2Config(
        vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    trainer = TorchTrainer(
        build_random_model(config, device="cuda", dtype=torch.float32),
        sender=NoSender(),
        ledger=TimeLedger(TRAINER_ACTIVITIES),
        compute_dtype="bf16",
        learning_rate=1e-3,
        row_tokens=1024,
        minibatches=num_minibatches,
        offload=offload,
    )
    optimizer = trainer.optimizer
    assert isinstance(optimizer, StreamedAdamW)
    optimizer._piece_numel = 2**14
    twins = {own: nn.Parameter(own.detach().clone()) for own in trainer.model.parameters()}
    groups = [{**g, "params": [twins[own] for own in g["params"]]} for g in optimizer.param_groups]
    plain, step, num_brought = torch.optim.AdamW(groups, fused=True), optimizer.step, []

    def both() -> None:
        num_brought.append(len(optimizer._early))
        for own, twin in twins.items():
            twin.grad = None if own.grad is None else own.grad.clone()
        step()
        plain.step()

    monkeypatch.setattr(optimizer, "step", both)
    workload = StepWorkload(num_groups=4, group_size=4, prompt_tokens=64, completion_tokens=192)
    samples = random_samples(workload, vocab_size=2000)
    for number in range(3):
        fresh = [replace(s, versions=np.where(s.loss_mask, number, -1).astype(np.int32)) for s in samples]
        result = trainer.step(TrainBatch(step=number + 1, version=number, samples=tuple(fresh)))
        assert result.skipped is None and result.metrics["num_rows"] >= 2 * num_minibatches
    assert num_brought[0] == 0 and min(num_brought[1:]) > 3
    optimizer.settle()
    for own, twin in twins.items():
        assert torch.equal(own, twin)
        for key, value in plain.state[twin].items():
            assert torch.equal(value.cpu(), optimizer.state[own][key].cpu()), key


def test_a_trainer_turns_heads_in_one_step() -> None:
    trainer = TorchTrainer(
        small_model(), sender=NoSender(), ledger=TimeLedger(TRAINER_ACTIVITIES), compute_dtype="bf16"
    )
    layers = trainer.policy.get_decoder().layers
    assert all(layer.self_attn.forward.__func__ is turned_forward for layer in layers)


@pytest.mark.parametrize("heads", ["apart", "joined", "turned"])
def test_a_compiled_layer_keeps_what_the_plan_says(heads: str) -> None:
    # As in a process of its own: layers of other widths, compiled by other tests, change what a compiler chooses, and
    # blocks that they let go of, a little too large, are given out whole.
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    config = Qwen2Config(
        vocab_size=500, hidden_size=256, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = build_random_model(config, device="cuda", dtype=torch.bfloat16)
    use_packed_attention(model)
    keep_float_residual(model)
    if heads != "apart":
        join_linears(model, (QUERY_KEY_VALUE,))
        join_gates(model)
    if heads == "turned":
        assert turn_heads(model) == 3
    found = DecoderBlocks(model, compiled=True)._probe()
    planned = examine(config, torch.bfloat16).compiled
    assert found == pytest.approx(planned.layers + planned.outside, rel=0.05)
