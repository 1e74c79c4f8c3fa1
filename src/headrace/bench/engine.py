"""The built-in engine against ``model.generate``: same model, same requests, one thread, 64 sequences at once.

In: model sizes, output lengths and a seed. Out: tokens per second of both sides and their ratio, each the
median of runs that alternate between the two. Stop tokens are off and every request asks for its length,
so both sides produce the same number of useful tokens; ``generate`` runs each batch to its longest member.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, PreTrainedModel

from headrace.engines.make import torch_engine
from headrace.engines.torch_engine import TorchEngine
from headrace.models.loading import load_model, make_tiny_model
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import Request, Sampling

VOCAB = 64
SIZES = {"0.13M": (64, 2, 4), "1M": (192, 2, 6)}
"""By name: hidden size, layers, heads."""


def lognormal_lengths(count: int, mean: float, max_over_mean: float, seed: int) -> np.ndarray:
    """``count`` lengths with this mean whose longest is about ``max_over_mean`` times it."""
    draws = np.random.default_rng(seed).standard_normal(count)
    low, high = 0.0, 4.0
    for _ in range(50):
        sigma = (low + high) / 2
        ratio = np.exp(sigma * draws).max() / np.exp(sigma * draws).mean()
        low, high = (sigma, high) if ratio < max_over_mean else (low, sigma)
    lengths = np.exp(low * draws)
    return np.maximum(1, np.round(lengths * mean / lengths.mean())).astype(int)


def run(
    *,
    sizes: Sequence[str] = ("0.13M", "1M"),
    equal_lengths: Sequence[int] = (64, 128),
    num_lognormal: int = 256,
    lognormal_mean: float = 64.0,
    prompt_tokens: int = 16,
    batch: int = 64,
    repeats: int = 3,
    seed: int = 0,
) -> dict[str, Any]:
    """All figures as plain numbers: ``cases`` by size and lengths, and what they were taken with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        workloads = {f"equal {n}": np.full(batch, n) for n in equal_lengths}
        workloads["log-normal"] = lognormal_lengths(num_lognormal, lognormal_mean, 6.0, seed)
        cases = []
        for size in sizes:
            with tempfile.TemporaryDirectory() as directory:
                hidden, layers, heads = SIZES[size]
                make_tiny_model(
                    directory, vocab_size=VOCAB, hidden_size=hidden, num_layers=layers, num_heads=heads,
                    seed=seed,
                )  # fmt: skip
                for name, lengths in workloads.items():
                    figures = _compare(Path(directory), lengths, prompt_tokens, batch, repeats, seed)
                    cases.append({"size": size, "lengths": name, **figures})
    finally:
        torch.set_num_threads(threads)
    return {"cases": cases, "batch": batch, "repeats": repeats, "prompt_tokens": prompt_tokens, "threads": 1}


def _compare(
    directory: Path, lengths: np.ndarray, prompt_tokens: int, batch: int, repeats: int, seed: int
) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, VOCAB, (len(lengths), prompt_tokens))
    plain = load_model(directory)
    engine = torch_engine(
        load_model(directory),
        ledger=TimeLedger(ENGINE_ACTIVITIES),
        max_running=batch,
        # As generate does: all prompts of a batch in one pass.
        prefill_tokens=batch * prompt_tokens,
    )
    sides: dict[str, Callable[[], None]] = {
        "generate": lambda: _generate(plain, prompts, lengths, batch),
        "engine": lambda: _engine(engine, prompts, lengths),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    tokens = float(lengths.sum())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "engine_tokens_per_s": tokens / median["engine"],
        "generate_tokens_per_s": tokens / median["generate"],
        "ratio": median["generate"] / median["engine"],
        "max_over_mean": float(lengths.max() / lengths.mean()),
    }


def _generate(model: PreTrainedModel, prompts: np.ndarray, lengths: np.ndarray, batch: int) -> None:
    for start in range(0, len(lengths), batch):
        longest = int(lengths[start : start + batch].max())
        ids = torch.from_numpy(prompts[start : start + batch])
        config = GenerationConfig(
            max_new_tokens=longest, min_new_tokens=None, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            pad_token_id=0, eos_token_id=None, bos_token_id=None,
        )  # fmt: skip
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert out.shape[1] == prompts.shape[1] + longest


def _engine(engine: TorchEngine, prompts: np.ndarray, lengths: np.ndarray) -> None:
    produced = 0
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sampling = Sampling(max_tokens=int(length))
        engine.submit(Request(id=str(i), prompt_ids=prompt.astype(np.int32), sampling=sampling, seed=i))
    while engine.has_work:
        produced += sum(completion.num_tokens for _, completion in engine.step())
    assert produced == lengths.sum()


def table(figures: Mapping[str, Any]) -> Table:
    """The figures for people."""
    title = f"one thread, {figures['batch']} sequences at once, median of {figures['repeats']}"
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("parameters", "lengths", "engine tokens/s", "generate tokens/s", "ratio", "max/mean"):
        drawn.add_column(name, justify="right")
    for case in figures["cases"]:
        drawn.add_row(
            case["size"],
            case["lengths"],
            f"{case['engine_tokens_per_s']:,.0f}",
            f"{case['generate_tokens_per_s']:,.0f}",
            f"{case['ratio']:.2f}x",
            f"{case['max_over_mean']:.1f}",
        )
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    Console().print(table(run(repeats=options.repeats, seed=options.seed)))


if __name__ == "__main__":
    main()
