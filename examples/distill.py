"""On-policy distillation: a small random student learns to answer as a trained teacher does, on a CPU.

    python examples/distill.py [forward|reverse|sampled] [steps]

The teacher is a tiny model over single characters that was trained to spell words backwards; the student has half its
width and knows nothing. There is no reward: the student samples, the teacher says what it thinks of every token, and
the divergence between the two is the whole loss. Printed is the course of the loss and, before and after,
KL(student || teacher) summed over the whole vocabulary at every position of the student's own answers to words that
it was never asked in training.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import headrace
from headrace import build
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.data.rendering import Renderer
from headrace.models.loading import make_tiny_model

LETTERS, WORD_LENGTH = "abcdef", 4
ANSWER_TOKENS = WORD_LENGTH + 1
"""The letters and the end of the text."""

words = ["".join(letters) for letters in itertools.product(LETTERS, repeat=WORD_LENGTH)]
random.Random(0).shuffle(words)
rows = [{"prompt": f"{word}>", "answer": word[::-1]} for word in words]
UNSEEN, SEEN = rows[:256], rows[256:]


def make_models(directory: Path) -> tuple[Path, Path]:
    """A teacher that spells backwards, and a student that does not."""
    blank, teacher, student = directory / "blank", directory / "teacher", directory / "student"
    for model, width, seed in ((blank, 64, 0), (student, 32, 1)):
        vocab_size = make_char_tokenizer(model, LETTERS + ">")
        make_tiny_model(model, vocab_size=vocab_size, hidden_size=width, context_tokens=64, seed=seed)
    headrace.warm_start(model=blank, examples=rows, output=teacher, steps=250, learning_rate=3e-3)
    return teacher, student


@torch.no_grad()
def kl_to_teacher(student_dir: Path, teacher_dir: Path) -> float:
    """Nats per token, exact at every position of what the student samples."""
    torch.manual_seed(0)
    student, teacher = (AutoModelForCausalLM.from_pretrained(d).eval() for d in (student_dir, teacher_dir))
    renderer = Renderer.from_directory(teacher_dir)
    token_ids = torch.tensor([renderer.encode(row["prompt"]).tolist() for row in UNSEEN])
    unfinished = torch.ones(len(UNSEEN), dtype=torch.bool)
    total, count = 0.0, 0
    for _ in range(ANSWER_TOKENS):
        own, other = (model(token_ids).logits[:, -1].log_softmax(-1) for model in (student, teacher))
        total += float((own.exp() * (own - other)).sum(-1)[unfinished].sum())
        count += int(unfinished.sum())
        drawn = torch.multinomial(own.exp(), 1)
        token_ids = torch.cat([token_ids, drawn], dim=1)
        unfinished &= ~torch.isin(drawn[:, 0], torch.tensor(renderer.stop_ids))
    return total / count


def main(divergence: str = "forward", steps: str = "200") -> float:
    """Returns the share by which the divergence fell."""
    build.quieten()
    with tempfile.TemporaryDirectory() as made:
        teacher, student = make_models(Path(made))
        before, started = kl_to_teacher(student, teacher), time.perf_counter()
        result = headrace.train(
            model=student,
            tasks=SEEN,
            reward=[],
            settings={
                "distill.teachers": {"speller": str(teacher)},
                "distill.divergence": divergence,
                "model.device": "cpu",
                "run.dir": str(Path(made) / "runs"),
                "run.steps": int(steps),
                "run.launcher": "inline",
                "run.checkpoint_every": 0,
                "run.console": "off",
                "rollout.group_size": 2,
                "rollout.groups_per_step": 32,
                "rollout.max_tokens": ANSWER_TOKENS,
                "engine.max_running": 256,
                "trainer.learning_rate": 6e-3,
                "trainer.schedule": "linear",
                "trainer.betas": [0.9, 0.95],
            },
        )
        seconds = time.perf_counter() - started
        events = map(json.loads, (result.run_dir / "events.jsonl").read_text().splitlines())
        curve = [event["metrics"]["teacher_divergence"] for event in events if event["event"] == "step"]
        after = kl_to_teacher(result.model_dir, teacher)
    print(f"distill.divergence = {divergence}, mean of ten steps")
    for step in range(20, len(curve) + 1, 20):
        mean = sum(curve[step - 10 : step]) / 10
        print(f"{step:5d}  {mean:7.4f}  {'#' * round(50 * mean / curve[0])}")
    print(f"KL to the teacher on unseen words: {before:.4f} -> {after:.4f} nats per token", end=" ")
    print(f"({1 - after / before:.1%} less) after {seconds:.0f} s of training")
    return 1 - after / before


if __name__ == "__main__":
    main(*sys.argv[1:])
