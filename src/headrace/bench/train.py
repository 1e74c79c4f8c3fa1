"""Forward, backward and optimizer step of the trainer on one GPU, and how much of the chip they use.

In: a model shape by name and a workload of groups. Out: seconds, tokens per second, model-FLOPs use and peak
memory, with and without shared prefixes, each the median of several runs after a warm one. Model FLOPs are
those of the tokens computed, counted once forward and twice backward, with nothing recomputed; the rate
they are held against is that of a large bf16 matrix product in the same run.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from rich.table import Table
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from headrace.bench.rates import matmul_flops_per_s, timed
from headrace.bench.shapes import create_random_model, shape_config
from headrace.bench.step_workload import StepWorkload
from headrace.data.packing import PackedRow, pack
from headrace.kernels import gated_library
from headrace.models import flash
from headrace.models.joined_linear import JoinedLinear
from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.blocks import decoder_layers
from headrace.trainers.placement import Offload
from headrace.trainers.streamed_adamw import StreamedAdamW
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import NO_KV, Sample, TrainBatch
from headrace.weights.gpu_segments import grow_segments


class LayerWeights(NamedTuple):
    """Of all decoder layers together."""

    all: int
    used: int
    """By one token."""


class NoSender:
    """Weights go nowhere."""

    def send(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError

    def retire(self, version: int) -> None: ...

    def close(self) -> None: ...


def run(
    *,
    shape: str = "qwen2-1.5b",
    workload: StepWorkload | None = None,
    row_tokens: int = 16384,
    repeats: int = 3,
    optimizer: bool = True,
    sharing: Sequence[bool] = (False, True),
    eager: bool = False,
    offload: Offload = "none",
    device: str = "cuda",
) -> dict[str, Any]:
    """All figures as plain numbers. Without ``optimizer`` only forward and backward are run, which leaves
    the memory of its moments to large models."""
    workload = workload or StepWorkload()
    if device == "cuda":
        # As a trainer does in a process of its own.
        grow_segments()
    rate = matmul_flops_per_s(device)
    cases = []
    for share in sharing:
        model = create_random_model(shape, device=device)
        case = measure(
            model, workload, row_tokens=row_tokens, repeats=repeats, optimizer=optimizer, share=share,
            eager=eager, offload=offload,
        )  # fmt: skip
        case["mfu"] = case["model_flops"] / case["forward_backward_s"] / rate
        cases.append(case)
        del model
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return {
        "shape": shape,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "attention": flash.kernels_in_use(torch.device(device), head_size(shape_config(shape))),
        "gated_layers": gated_library.kernels_in_use(torch.device(device)),
        "matmul_tflops": rate / 1e12,
        "repeats": repeats,
        "offload": offload,
        **asdict(workload),
        "cases": cases,
    }


def measure(
    model: PreTrainedModel,
    workload: StepWorkload,
    *,
    row_tokens: int,
    repeats: int,
    optimizer: bool,
    share: bool,
    eager: bool = False,
    offload: Offload = "none",
) -> dict[str, Any]:
    """The figures of one model, which is used up."""
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer = TorchTrainer(
        model, sender=NoSender(), ledger=TimeLedger(TRAINER_ACTIVITIES), row_tokens=row_tokens,
        compute_dtype="bf16", share_prefixes=share, eager=eager, offload=offload,
    )  # fmt: skip
    samples = random_samples(workload, vocab_size=model.get_input_embeddings().num_embeddings)
    rows = pack(samples, row_tokens=row_tokens, share_prefixes=share)

    def forward_backward() -> None:
        for part in trainer.prepare(_batch(trainer, samples)):
            trainer.accumulate(part, before_update=True, update_follows=optimizer)

    def clear() -> None:
        trainer.optimizer.zero_grad(set_to_none=True)

    first_s, times = timed(forward_backward, repeats, on_gpu=on_gpu, between=clear)
    clear()
    figures: dict[str, Any] = {
        "share_prefixes": share,
        "num_tokens": sum(row.num_computed for row in rows),
        "num_rows": len(rows),
        "row_tokens": row_tokens,
        "first_s": first_s,
        "forward_backward_s": statistics.median(times),
        "forward_backward_runs_s": times,
        "model_flops": model_flops(trainer.policy, rows),
        "num_layers_recomputed": trainer.blocks.num_recomputed,
        "kept_bytes_per_token": trainer.blocks.bytes_per_token,
    }
    if optimizer:
        times = _step_times(trainer, samples, repeats)
        figures |= {"step_s": statistics.median(times), "step_runs_s": times}
    figures["rollout_tokens_per_s"] = (
        sum(sample.num_tokens for sample in samples) / figures["forward_backward_s"]
    )
    if on_gpu:
        figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        figures["peak_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return figures


def _step_times(trainer: TorchTrainer, samples: Sequence[Sample], repeats: int) -> list[float]:
    """Until the weights are there. Moments that then leave for the host do so, in a run, behind the weights and while
    the next completions are generated."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        trainer.step(_batch(trainer, samples))
        if trainer.model.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        seconds.append(time.perf_counter() - start)
        if isinstance(trainer.optimizer, StreamedAdamW):
            trainer.optimizer.settle()
        if trainer.model.device.type == "cuda":
            torch.cuda.synchronize()
    return seconds[1:]


def _batch(trainer: TorchTrainer, samples: Sequence[Sample]) -> TrainBatch:
    return TrainBatch(step=trainer.num_steps + 1, version=trainer.version, samples=tuple(samples))


def random_samples(workload: StepWorkload, *, vocab_size: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    num_tokens = workload.prompt_tokens + workload.completion_tokens
    loss_mask = np.arange(num_tokens) >= workload.prompt_tokens
    samples = []
    for group in range(workload.num_groups):
        prompt = rng.integers(0, vocab_size, workload.prompt_tokens)
        for attempt in range(workload.group_size):
            completion = rng.integers(0, vocab_size, workload.completion_tokens)
            samples.append(
                Sample(
                    group=group,
                    attempt=attempt,
                    token_ids=np.concatenate([prompt, completion]).astype(np.int32),
                    loss_mask=loss_mask,
                    behavior_logprobs=np.where(loss_mask, -math.log(vocab_size), 0).astype(np.float32),
                    versions=np.where(loss_mask, 0, -1).astype(np.int32),
                    advantages=np.where(loss_mask, rng.normal(), 0).astype(np.float32),
                    temperature=1.0,
                    kv_versions=NO_KV,
                )
            )
    return samples


def model_flops(model: PreTrainedModel, rows: Sequence[PackedRow]) -> float:
    """A multiplication and an addition for each weight and token, and for each pair attention looks at
    (scores and values), times three: once forward, twice backward. The head is run on loss tokens only."""
    layers = decoder_layers(model)
    config, head_dim = model.config, head_size(model.config)
    tokens = sum(row.num_computed for row in rows)
    loss_tokens = sum(int(row.loss_mask.sum()) for row in rows)
    pairs = sum(_attended_pairs(row) for row in rows)
    body = 2.0 * tokens * layer_weights(model).used
    head = 2.0 * loss_tokens * model.get_output_embeddings().weight.numel()
    attention = 4.0 * pairs * config.num_attention_heads * head_dim * len(layers)
    return 3 * (body + head + attention)


def layer_weights(model: PreTrainedModel) -> LayerWeights:
    """Of linear layers and experts; what a router and norms have is left out."""
    kinds, config = (nn.Linear, JoinedLinear), model.config
    layers = decoder_layers(model)
    dense = sum(m.weight.numel() for layer in layers for m in layer.modules() if isinstance(m, kinds))
    experts = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() == 3)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((found for name in names if (found := getattr(config, name, None))), 1)
    used = experts * config.num_experts_per_tok // count if experts else 0
    return LayerWeights(dense + experts, dense + used)


class BytesRead(NamedTuple):
    """By a decode pass, in 16 bits a number."""

    weights: float
    """Layers and head; of a mixture every expert."""
    token: float
    """Its keys and values in all layers."""


def bytes_read(model: PreTrainedModel) -> BytesRead:
    config = model.config
    weights = layer_weights(model).all + model.get_output_embeddings().weight.numel()
    width = 2 * config.num_key_value_heads * head_size(config)
    return BytesRead(2.0 * weights, 2.0 * config.num_hidden_layers * width)


def head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _attended_pairs(row: PackedRow) -> float:
    lengths = np.add.reduceat(row.computed.astype(np.int64), row.cu_seqlens[:-1])
    prefixes = np.where(row.parents < 0, 0, lengths[row.parents])
    return float((lengths * (lengths + 1) / 2 + lengths * prefixes).sum())


def table(figures: Mapping[str, Any]) -> Table:
    """The figures for people."""
    title = (
        f"{figures['shape']} on {figures['device']}: {figures['num_groups']} x {figures['group_size']} rollouts of "
        f"{figures['prompt_tokens']} + {figures['completion_tokens']} tokens, median of {figures['repeats']}"
    )
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in (
        "prompts",
        "forward + backward",
        "step",
        "rollout tokens/s",
        "model-FLOPs use",
        "peak memory",
    ):
        drawn.add_column(name, justify="right")
    for case in figures["cases"]:
        drawn.add_row(
            "shared" if case["share_prefixes"] else "repeated",
            f"{case['forward_backward_s']:.2f} s",
            f"{case['step_s']:.2f} s" if "step_s" in case else "-",
            f"{case['rollout_tokens_per_s']:,.0f}",
            f"{case['mfu']:.1%}",
            f"{case['peak_gb']:.1f} GB" if "peak_gb" in case else "-",
        )
    return drawn
