"""Branching off failed attempts (DEEP-GRPO) against plain GRPO, at equal generated tokens.

    python examples/deep_grpo.py            # one seed
    python examples/deep_grpo.py 1 2 3 4 5  # the first table of docs/pivots.md
    python examples/deep_grpo.py 1 2 3 4 5 --right 0.4 --steps 70  # the second

The task has a long easy part and a decisive step at its end: repeat a word three times, then write it backwards, and
only an answer that is right throughout is worth anything. In many of the examples of the warm start the last word is
any word (``--right`` is the share of the others), so the model that reinforcement begins with repeats well, reverses
seldom, and fails late. GRPO writes the whole answer again to try the last step once more; a branch begins after the
``|`` of a failed attempt and costs only what comes behind it.

Plain GRPO has 12 groups a step. DEEP-GRPO has 8, and spends the tokens of the others on branches. The reward is that
of the ordinary groups alone: attempts from the prompt, by the policy of that moment. Everything runs in one process
at lag 0. A seed gives GRPO the same numbers again; those of DEEP-GRPO differ a little from run to run, because branch
groups are numbered, and so given their noise, in the order in which groups happen to be scored.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import headrace
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.models.loading import make_tiny_model
from headrace.observe.jsonl import read_events

LETTERS, LENGTH, REPEATS = "abcdef", 4, 3
SETTINGS: dict[str, Any] = {
    "model.device": "cpu",
    "run.launcher": "inline",
    "run.console": "off",
    "run.checkpoint_every": 0,
    "rollout.group_size": 8,
    "rollout.max_tokens": LENGTH * (REPEATS + 1) + 2,
    "rollout.max_lag": 0,
    "algo.aggregation": "seq-mean-token-mean",
    "engine.max_running": 256,
    "trainer.learning_rate": 3e-4,
    "trainer.betas": [0.9, 0.95],
}
GRPO: dict[str, Any] = {"rollout.groups_per_step": 12}
DEEP: dict[str, Any] = {
    "rollout.groups_per_step": 8,
    "pivots.branches": 8,
    "pivots.options": {"delimiters": ["|"], "per_group": 2},
}


def rows(num: int, *, seed: int, right: float = 1.0) -> list[dict[str, str]]:
    """Words with their answers; only a share of them ends ``right``, the others in any letters."""
    draw = random.Random(seed)
    made = []
    for _ in range(num):
        word, other = ("".join(draw.choices(LETTERS, k=LENGTH)) for _ in range(2))
        end = word[::-1] if draw.random() < right else other
        made.append({"prompt": f"{word}>", "answer": f"{word * REPEATS}|{end}"})
    return made


def exact(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def warm_started(directory: Path, *, seed: int, right: float) -> Path:
    """A model that knows the form of an answer, and gets a few in a hundred right."""
    new, started = directory / "new", directory / "started"
    vocab_size = make_char_tokenizer(new, LETTERS + ">|")
    make_tiny_model(new, vocab_size=vocab_size, hidden_size=64, num_layers=2, context_tokens=64, seed=seed)
    examples = rows(4096 * 4, seed=seed + 1_000_000, right=right)
    headrace.warm_start(
        model=new, examples=examples, output=started, steps=140, learning_rate=3e-3, seed=seed
    )
    return started


def train(directory: Path, model: Path, name: str, seed: int, more: dict[str, Any]) -> list[dict[str, Any]]:
    """The step events of a run."""
    where = {"run.seed": seed, "run.dir": str(directory), "run.name": name}
    settings = {**SETTINGS, **more, **where}
    result = headrace.train(model=model, tasks=rows(4096, seed=seed), reward=exact, settings=settings)
    return [e for e in read_events(result.run_dir / "events.jsonl") if e["event"] == "step"]


def sampled(step: dict[str, Any]) -> int:
    """Tokens sampled until then, whatever became of them."""
    return sum(step["tokens_by_state"].values())


def rewards(steps: list[dict[str, Any]], budget: int) -> tuple[float, float]:
    """Mean reward over the whole of a token budget, and over its last quarter."""
    spent = [step for step in steps if sampled(step) <= budget]
    late = [step["reward"] for step in spent if sampled(step) > 0.75 * budget]
    return mean(step["reward"] for step in spent), mean(late)


def compare(seed: int, *, right: float, steps: int) -> tuple[float, float]:
    """Prints one line of the table; returns the gain in both numbers."""
    with tempfile.TemporaryDirectory() as made:
        model = warm_started(Path(made), seed=seed, right=right)
        plain = train(Path(made), model, "grpo", seed, {**GRPO, "run.steps": steps})
        deep = train(Path(made), model, "deep", seed, {**DEEP, "run.steps": steps})
    budget = min(sampled(plain[-1]), sampled(deep[-1]))
    of_plain, of_deep = rewards(plain, budget), rewards(deep, budget)
    counters = deep[-1]["roles"][0]["counters"]
    share = counters["forked_tokens"] / (counters["forked_tokens"] + counters["prefill_tokens"])
    print(
        f"| {seed} | {budget:,} | {of_plain[0]:.3f} | {of_deep[0]:.3f} | {of_plain[1]:.3f} | {of_deep[1]:.3f} "
        f"| {counters['forks']:.0f} | {counters['forked_tokens']:,.0f} | {share:.0%} |",
        flush=True,
    )
    return of_deep[0] - of_plain[0], of_deep[1] - of_plain[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--right", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    sides = "GRPO, mean | DEEP, mean | GRPO, last quarter | DEEP, last quarter"
    print(f"| seed | tokens | {sides} | forks | prefill tokens saved | share |")
    print("|---|---|---|---|---|---|---|---|---|")
    gains = [compare(seed, right=asked.right, steps=asked.steps) for seed in asked.seeds]
    for name, values in zip(("mean", "last quarter"), zip(*gains, strict=True), strict=True):
        spread = f" +- {stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
        print(
            f"DEEP-GRPO over GRPO, {name}: {mean(values):+.3f}{spread} (mean and its standard error, paired by seed)"
        )


if __name__ == "__main__":
    main()
