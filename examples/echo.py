"""Learn from what an environment answers where rewards say nothing yet: two turns, with and without ECHO.

    python examples/echo.py

A task is a letter. The policy says something, whatever it likes; the environment answers with the five letters that
follow the task's, round and round, and asks for the next three (``c`` is answered ``defgh``, then ``ijk`` is right).
Only all three together are rewarded, which a model that starts from nothing almost never meets. But every attempt shows
a piece of the order; with ``"echo.coef"`` above 0 the answers are trained on too, and rewards come by themselves.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

import headrace
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.data.rendering import Renderer
from headrace.models.loading import make_tiny_model
from headrace.protocols import PolicyClient
from headrace.types import Sampling, Task, Trajectory

LETTERS = "abcdefghijklmnop"
SHOWN, ASKED, STEPS = 5, 3, 60


def following(letter: str, first: int, count: int) -> str:
    start = LETTERS.index(letter) + first
    return "".join(LETTERS[(start + n) % len(LETTERS)] for n in range(count))


class NextLetters:
    """The second prompt repeats everything before it, so both turns are one sample, with the answer in between."""

    def __init__(self, renderer: Renderer, sampling: Sampling) -> None:
        self._renderer, self._sampling = renderer, sampling

    async def run(self, task: Task, policy: PolicyClient) -> tuple[Trajectory, ...]:
        shown = self._renderer.prompt_ids(task)
        first = await policy.sample(shown, replace(self._sampling, max_tokens=1))
        answer = self._renderer.encode(following(task.columns["letter"], 1, SHOWN))
        seen = np.concatenate([shown, first.completion.token_ids, answer]).astype(np.int32)
        second = await policy.sample(seen, self._sampling)
        text = self._renderer.decode(second.completion.token_ids)
        return (Trajectory(turns=(first, second), text=text),)


def all_three(completions: list[str], letter: list[str]) -> list[float]:
    wanted = [following(given, 1 + SHOWN, ASKED) for given in letter]
    return [float(text == right) for text, right in zip(completions, wanted, strict=True)]


def train(directory: Path, coef: float) -> list[dict[str, float]]:
    """Reward and the environment's cross-entropy of every step."""
    result = headrace.train(
        model=directory / "model",
        tasks=[{"prompt": f"{letter}>", "letter": letter} for letter in LETTERS],
        reward=all_three,
        environment=NextLetters,
        settings={
            "run.dir": str(directory), "run.name": f"echo-{coef:g}", "run.steps": STEPS,
            "run.launcher": "inline", "run.console": "off", "run.checkpoint_every": 0,
            "rollout.group_size": 16, "rollout.groups_per_step": 8, "rollout.max_lag": 0,
            "rollout.max_tokens": ASKED, "trainer.learning_rate": 2e-3, "model.device": "cpu",
            "algo.options": {"echo.coef": coef},
        },
    )  # fmt: skip
    events = map(json.loads, (result.run_dir / "events.jsonl").read_text().splitlines())
    return [{"reward": e["reward"], **e["metrics"]} for e in events if e["event"] == "step"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="headrace-echo-") as made:
        size = make_char_tokenizer(Path(made) / "model", LETTERS + ">")
        make_tiny_model(
            Path(made) / "model", vocab_size=size, hidden_size=64, init_std=0.1, context_tokens=32
        )
        plain, echoing = train(Path(made), 0.0), train(Path(made), 0.1)
    print("steps    reward  with ECHO  cross-entropy of the answers with it")
    for first in range(0, STEPS, 12):
        span = slice(first, first + 12)
        before, now = (np.mean([s["reward"] for s in steps[span]]) for steps in (plain, echoing))
        told = np.mean([s["environment_loss"] for s in echoing[span]])
        print(f"{first + 1:>2}-{first + 12:<4} {before:>7.2f} {now:>10.2f} {told:>10.2f}")
