"""Hello, Headrace: a tiny model learns to spell words backwards, on a CPU, in about a minute.

    python examples/hello.py

Everything is made here: the model (random weights), its tokenizer, the tasks and the reward. With a real
model only the first block goes away. Look at the run directory afterwards: its checkpoints load
with transformers' ``from_pretrained``.
"""

from __future__ import annotations

import random

import headrace
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.models.loading import make_tiny_model

LETTERS = "abcdef"

# A model of 0.13M parameters over single characters.
vocab_size = make_char_tokenizer("runs/hello-model", LETTERS + ">")
make_tiny_model("runs/hello-model", vocab_size=vocab_size, context_tokens=64)

words = ["".join(random.Random(i).choices(LETTERS, k=3)) for i in range(2000)]
tasks = [{"prompt": f"{word}>", "answer": word[::-1]} for word in words]


def letters_right(completions: list[str], answer: list[str]) -> list[float]:
    """The share of positions that hold the right letter."""
    return [
        sum(a == b for a, b in zip(text, right, strict=False)) / len(right)
        for text, right in zip(completions, answer, strict=True)
    ]


result = headrace.train(
    model="runs/hello-model",
    tasks=tasks,
    reward=letters_right,
    settings={
        "run.steps": 250,
        "rollout.group_size": 16,
        "rollout.groups_per_step": 16,
        "rollout.max_tokens": 3,
        "engine.max_running": 256,
        "trainer.learning_rate": 1e-3,
        "trainer.betas": [0.9, 0.95],
    },
)
print(f"reward {result.rewards[0]:.2f} -> {result.rewards[-1]:.2f}; the model is in {result.model_dir}")
