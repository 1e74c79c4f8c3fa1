"""How far the trainer's log-probabilities are from those the engine sampled with, in bf16, and why.

In: a model shape. Out: mean, 99th percentile and maximum of |log pi - log mu| over tokens sampled from one random
model, and the same for pairs that differ in one part only, each pair on the same tokens and weights.

- ``mismatch``: what a training step sees on fresh tokens, sampled by decoding passes.
- ``decoding``: the engine's decoding against its prefill passes. They differ in attention kernel and in the number
  of rows of each matrix product, which cannot be told apart here.
- ``prefill``: the engine's prefill against the trainer, so kernels and compilation without decoding.
- ``attention``: the trainer's attention kernel against scores, softmax and sums in float32.
- ``compiling``: the trainer's compiled layers against the same ones uncompiled (nothing on a CPU).
- ``head``: float32 logits against logits rounded to bf16, on the same hidden states. On a GPU both sides keep
  float32 logits, so this is what they avoid and no part of the mismatch; on a CPU the engine rounds.
- ``engine_error`` and ``trainer_error``: each side against the same weights computed in float32.

With vLLM as a peer, ``vllm_trl_*`` is its mismatch with TRL's trainer on tokens vLLM decoded, and ``same_tokens`` is
ours on these. There the engine's side is a prefill: tokens sampled elsewhere are not decoded again, so
``mismatch``, on tokens of its own, stands beside it. The lower of TRL's means is held against both.

Lines of single causes do not add up to the mismatch: rounding differently anywhere sends all later layers another
way, so a line says how far one change alone moves the result. Random weights give flat distributions; with
trained weights every figure here would be another.

Shape legend: S samples, P prompt tokens, L sampled tokens of each.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import PreTrainedModel

from headrace.bench import mismatch_with_vllm
from headrace.bench.mismatch_sides import (
    exact_attention,
    head_rounding,
    model_logprobs,
    packed_rows,
    sample_with_engine,
    score_with_engine,
)
from headrace.bench.mismatch_with_vllm import Peer
from headrace.bench.shapes import create_random_model
from headrace.bench.train import NoSender
from headrace.data.packing import PackedRow
from headrace.engines.make import torch_engine
from headrace.errors import ConfigError
from headrace.timekeeping import ENGINE_ACTIVITIES, TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.master_weights import compute_copy
from headrace.trainers.torch_trainer import TorchTrainer

LABELS = {
    "mismatch": "engine, decoding | trainer",
    "decoding": "engine, decoding | engine, prefill",
    "prefill": "engine, prefill | trainer",
    "attention": "trainer | with float32 attention",
    "compiling": "trainer | uncompiled",
    "head": "float32 logits | bf16 logits",
    "engine_error": "engine, decoding | float32",
    "trainer_error": "trainer | float32",
    "vllm_trl_bfloat16": "vLLM | TRL, bf16 weights",
    "vllm_trl_float32": "vLLM | TRL, float32 weights",
    "same_tokens": "engine, prefill | trainer, vLLM's tokens",
    "vllm_error": "vLLM | float32",
    "trl_bfloat16_error": "TRL, bf16 weights | float32",
    "trl_float32_error": "TRL, float32 weights | float32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Groups of samples of equal lengths, all decoded together."""

    num_prompts: int = 32
    group_size: int = 2
    prompt_tokens: int = 256
    completion_tokens: int = 256
    row_tokens: int = 8192
    seed: int = 0

    def prompts(self, vocab_size: int) -> np.ndarray:
        """int32 [S, P], each prompt once a sample."""
        rng = np.random.default_rng(self.seed)
        drawn = rng.integers(0, vocab_size, (self.num_prompts, self.prompt_tokens)).astype(np.int32)
        return drawn.repeat(self.group_size, axis=0)


@dataclass(frozen=True, slots=True)
class EngineSide:
    """Tokens the engine sampled, and its log-probabilities of them."""

    token_ids_SL: np.ndarray
    sampled_SL: np.ndarray
    """float32, by the decoding passes that drew them."""
    scored_SL: np.ndarray
    """float32, by prefill passes."""
    peer_scored_SL: np.ndarray | None
    """float32, of the peer's tokens; None: there is no peer."""


def run(
    shape: str,
    *,
    against: str | None = None,
    peer_python: Path | None = None,
    workload: Workload | None = None,
    device: str = "cuda",
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All figures as plain numbers; ``against`` vllm adds those of TRL with vLLM, in the same command."""
    if against not in (None, "vllm"):
        raise ConfigError(f"--against {against}: only vllm (with TRL's trainer) can be run beside")
    if against == "vllm":
        mismatch_with_vllm.check_installed(peer_python)
    workload = workload or Workload()
    model = create_random_model(shape, device=device, seed=workload.seed)
    prompts_SP = workload.prompts(int(model.config.vocab_size))
    peer = None
    if against == "vllm":
        progress("running vLLM and TRL's trainer")
        with tempfile.TemporaryDirectory(prefix="headrace-mismatch-") as directory:
            model.save_pretrained(directory)
            peer = mismatch_with_vllm.run(
                Path(directory), prompts_SP, workload.completion_tokens, peer_python
            )
    return {
        "shape": shape,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        **asdict(workload),
        **measure(model, prompts_SP, workload, peer=peer, progress=progress),
    }


def measure(
    model: PreTrainedModel,
    prompts_SP: np.ndarray,
    workload: Workload,
    *,
    peer: Peer | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The gaps of one bf16 model, which is used up; with a peer also its own, and ours on its tokens."""
    # Copied before the engine takes the model over. From bf16 to float32 and back nothing is lost.
    master = compute_copy(model, torch.float32).requires_grad_(True)
    engine = _run_engine(model, prompts_SP, workload, peer, progress)
    gc.collect()  # the engine and its memory for keys and values
    if master.device.type == "cuda":
        torch.cuda.empty_cache()
    progress("computing the trainer's side")
    trainer = TorchTrainer(
        master, sender=NoSender(), ledger=TimeLedger(TRAINER_ACTIVITIES), row_tokens=workload.row_tokens,
        compute_dtype="bf16",
    )  # fmt: skip
    gaps = _our_gaps(trainer, prompts_SP, workload, engine)
    if peer is None:
        return {"gaps": gaps}
    assert engine.peer_scored_SL is not None
    gaps |= _peer_gaps(trainer, prompts_SP, workload, peer, engine.peer_scored_SL)
    best = min(gap["mean"] for name, gap in gaps.items() if name.startswith("vllm_trl_"))
    return {
        "gaps": gaps,
        "ratio_same_tokens": best / gaps["same_tokens"]["mean"],
        "ratio_own_tokens": best / gaps["mismatch"]["mean"],
        "peer": dict(peer.about),
    }


def _run_engine(
    model: PreTrainedModel,
    prompts_SP: np.ndarray,
    workload: Workload,
    peer: Peer | None,
    progress: Callable[[str], None],
) -> EngineSide:
    tokens_each = prompts_SP.shape[1] + workload.completion_tokens
    engine = torch_engine(
        model, ledger=TimeLedger(ENGINE_ACTIVITIES), max_running=len(prompts_SP),
        # A block over for each sample, whose last one is rarely full, and room to score beside them.
        kv_tokens=(len(prompts_SP) + 1) * (tokens_each + 16), progress=progress,
    )  # fmt: skip
    token_ids_SL, sampled_SL = sample_with_engine(
        engine, prompts_SP, workload.completion_tokens, workload.seed
    )
    return EngineSide(
        token_ids_SL,
        sampled_SL,
        score_with_engine(engine, prompts_SP, token_ids_SL),
        None if peer is None else score_with_engine(engine, prompts_SP, peer.token_ids_SL),
    )


def _our_gaps(
    trainer: TorchTrainer, prompts_SP: np.ndarray, workload: Workload, engine: EngineSide
) -> dict[str, dict[str, float]]:
    rows = _rows(trainer, prompts_SP, engine.token_ids_SL, workload)
    policy = trainer.policy
    trained_SL = model_logprobs(policy, rows)
    with torch.no_grad():
        # Without gradients layers are compiled anew, so what is swapped is held against this.
        plain_SL = model_logprobs(policy, rows)
        with torch.compiler.set_stance("force_eager"):
            uncompiled_SL = model_logprobs(policy, rows)
        with exact_attention(policy):
            exact_SL = model_logprobs(policy, rows)
    true_SL = _reference(trainer, rows)
    return {
        "mismatch": gap(trained_SL, engine.sampled_SL),
        "decoding": gap(engine.scored_SL, engine.sampled_SL),
        "prefill": gap(trained_SL, engine.scored_SL),
        "attention": gap(plain_SL, exact_SL),
        "compiling": gap(plain_SL, uncompiled_SL),
        "head": gap(head_rounding(policy, rows), np.zeros(1)),
        "engine_error": gap(engine.sampled_SL, true_SL),
        "trainer_error": gap(trained_SL, true_SL),
    }


def _peer_gaps(
    trainer: TorchTrainer, prompts_SP: np.ndarray, workload: Workload, peer: Peer, scored_SL: np.ndarray
) -> dict[str, dict[str, float]]:
    rows = _rows(trainer, prompts_SP, peer.token_ids_SL, workload)
    true_SL = _reference(trainer, rows)
    gaps = {
        f"vllm_trl_{weights}": gap(trained_SL, peer.sampled_SL)
        for weights, trained_SL in peer.trained_SL.items()
    }
    gaps["same_tokens"] = gap(model_logprobs(trainer.policy, rows), scored_SL)
    gaps["vllm_error"] = gap(peer.sampled_SL, true_SL)
    return gaps | {
        f"trl_{weights}_error": gap(trained_SL, true_SL) for weights, trained_SL in peer.trained_SL.items()
    }


def _rows(
    trainer: TorchTrainer, prompts_SP: np.ndarray, token_ids_SL: np.ndarray, workload: Workload
) -> tuple[PackedRow, ...]:
    on_gpu = trainer.policy.device.type == "cuda"
    rows = packed_rows(prompts_SP, token_ids_SL, row_tokens=workload.row_tokens, share_prefixes=on_gpu)
    trainer.blocks.fit(max(row.num_computed for row in rows), reserved_bytes=0, slope_bytes=1)
    return rows


@torch.no_grad()
def _reference(trainer: TorchTrainer, rows: tuple[PackedRow, ...]) -> np.ndarray:
    """The trainer's float32 weights, which hold the bf16 values, computed in float32 throughout."""
    with exact_attention(trainer.model):
        return model_logprobs(trainer.model, rows)


def gap(left: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """Of the distances between two sets of log-probabilities; tokens without one on a side are left out."""
    distances = np.abs(left.astype(np.float64) - right).reshape(-1)
    known = np.sort(distances[~np.isnan(distances)])
    if not known.size:
        raise ConfigError(
            "bench mismatch: there are no log-probabilities to compare; sample at least a token"
        )
    return {
        "mean": float(known.mean()),
        "p99": float(known[math.ceil(0.99 * known.size) - 1]),
        "max": float(known[-1]),
        "num_tokens": int(known.size),
    }


def table(figures: Mapping[str, Any]) -> Table:
    num_tokens = figures["gaps"]["mismatch"]["num_tokens"]
    title = f"|log pi - log mu|, {figures['shape']} in bf16, {num_tokens:,} tokens, {figures['device']}"
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), caption_justify="left")
    drawn.add_column("between")
    for name in ("mean", "p99", "max"):
        drawn.add_column(name, justify="right")
    for name, found in figures["gaps"].items():
        drawn.add_row(LABELS[name], *(f"{found[key]:.5f}" for key in ("mean", "p99", "max")))
    if "peer" in figures:
        drawn.caption = (
            f"lower mean of TRL with vLLM over ours: {figures['ratio_same_tokens']:.2f} on the same tokens, "
            f"{figures['ratio_own_tokens']:.2f} on our own"
        )
    return drawn
