"""Branching off failed attempts (DEEP-GRPO) against plain GRPO, at equal generated tokens.

    python examples/deep_grpo.py            # one seed, about a minute
    python examples/deep_grpo.py 0 1 2 3 4  # the table of docs/pivots.md

The task has a long easy part and a decisive step at its end: repeat a word three times, then write it backwards, and
only an answer that is right throughout is worth anything. The warm-started model repeats well and reverses badly,
so almost every attempt fails late. GRPO writes the whole answer again to try the last step once more; a branch
begins inside the failed attempt and costs only what comes after its pivot.

Both sides have the same groups a step, so plain GRPO gets more optimizer steps for the same number of tokens. The
reward is that of the ordinary groups alone: attempts from the prompt, by the policy of that moment.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import headrace
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.models.loading import make_tiny_model

LETTERS, LENGTH, REPEATS = "abcdef", 4, 3
TOKENS = 500_000
"""Sampled by either side, whatever became of them."""
ATTEMPT_TOKENS = LENGTH * (REPEATS + 1) + 2
PIVOTS = {"pivots.branches": 8, "pivots.segment_tokens": 2, "pivots.options": {"gamma": 2.0}}
SETTINGS: dict[str, Any] = {
    "model.device": "cpu",
    "run.launcher": "inline",
    "run.console": "off",
    "run.checkpoint_every": 0,
    "rollout.group_size": 8,
    "rollout.groups_per_step": 8,
    "rollout.max_tokens": ATTEMPT_TOKENS,
    "rollout.max_lag": 0,
    "algo.aggregation": "seq-mean-token-mean",
    "engine.block_size": 4,
    "engine.max_running": 256,
    "trainer.learning_rate": 8e-4,
    "trainer.betas": [0.9, 0.95],
}


def rows(num: int, *, seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    words = ["".join(draw.choices(LETTERS, k=LENGTH)) for _ in range(num)]
    return [{"prompt": f"{word}>", "answer": f"{word * REPEATS}|{word[::-1]}"} for word in words]


def exact(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def warm_started(directory: Path, *, seed: int, steps: int = 60) -> Path:
    """A model that knows the form of an answer and little more."""
    vocab_size = make_char_tokenizer(directory / "random", LETTERS + ">|")
    make_tiny_model(directory / "random", vocab_size=vocab_size, hidden_size=64, num_layers=2, context_tokens=64, seed=seed)
    headrace.warm_start(
        model=directory / "random", examples=rows(4096, seed=seed + 1_000_000), output=directory / "started",
        steps=steps, learning_rate=3e-3, seed=seed,
    )  # fmt: skip
    return directory / "started"


def train(directory: Path, model: Path, name: str, seed: int, more: dict[str, Any]) -> dict[str, Any]:
    """The reward over the last tenth of the token budget, and what the engine says of the forks."""
    per_step = SETTINGS["rollout.group_size"] * SETTINGS["rollout.groups_per_step"] * ATTEMPT_TOKENS
    result = headrace.train(
        model=model,
        tasks=rows(4096, seed=seed),
        reward=exact,
        settings={
            **SETTINGS, **more, "run.steps": TOKENS // per_step + 30, "run.seed": seed,
            "run.dir": str(directory), "run.name": name,
        },
    )  # fmt: skip
    lines = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    curve = [(sum(step["tokens_by_state"].values()), step["reward"], step) for step in steps]
    inside = [point for point in curve if point[0] <= TOKENS]
    last = [reward for tokens, reward, _ in inside if tokens > 0.9 * TOKENS]
    counters = inside[-1][2]["roles"][0]["counters"]
    return {"first": inside[0][1], "last": sum(last) / max(1, len(last)), "steps": len(inside), "curve": curve, **counters}
