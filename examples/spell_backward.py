"""A reasoning-gym generator as an endless task source: spelling words backwards.

    pip install -e '.[tasks]'
    python examples/spell_backward.py

The model is a tiny one over single characters, so the question is cut down to the word itself. With a
pretrained model use the generator as it is: ``tasks.source = "gym:spell_backward"`` and
``reward.functions = ["headrace.scoring.reasoning_gym:score"]`` in a run file.
"""

from __future__ import annotations

import string
import tempfile
from pathlib import Path

import headrace
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.data.tasks import from_reasoning_gym
from headrace.models.loading import make_tiny_model

generator = from_reasoning_gym("spell_backward", size=4000, options={"min_word_len": 4, "max_word_len": 4})
rows = []
for index in range(len(generator)):
    answer = str(generator.task(index).columns["answer"]).lower()
    if set(answer) <= set(string.ascii_lowercase):
        rows.append({"prompt": f"{answer[::-1]}>", "answer": answer})


def exact(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


with tempfile.TemporaryDirectory() as made:
    random_model, started = Path(made) / "random", Path(made) / "started"
    vocab_size = make_char_tokenizer(random_model, string.ascii_lowercase + ">")
    make_tiny_model(random_model, vocab_size=vocab_size, context_tokens=64)
    headrace.warm_start(model=random_model, examples=rows, output=started, steps=80, learning_rate=3e-3)
    result = headrace.train(
        model=started,
        tasks=rows,
        reward=exact,
        settings={
            "run.steps": 150,
            "rollout.group_size": 16,
            "rollout.groups_per_step": 16,
            "rollout.max_tokens": 8,
            "engine.max_running": 256,
            "trainer.learning_rate": 7e-4,
            "trainer.betas": [0.9, 0.95],
        },
    )
print(f"reward {result.rewards[0]:.2f} -> {result.rewards[-1]:.2f}")
