"""On-policy distillation: a small random student learns to answer as a trained teacher does, on a CPU.

    python examples/distill.py [sampled|forward|reverse]

The teacher is a tiny model over single characters that was trained to spell words backwards; the student is smaller
and knows nothing. There is no reward: the student samples, the teacher says how likely it finds every token, and the
divergence between the two is the whole loss. Printed is KL(student || teacher) per token, summed over the whole
vocabulary at every position of what the student samples for words it has never seen.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import headrace
from headrace import demo
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.data.rendering import Renderer
from headrace.models.loading import make_tiny_model

ANSWER_TOKENS = demo.WORD_LENGTH + 1


def make_models(directory: Path) -> tuple[Path, Path]:
    """A teacher that spells backwards, and a student with half its width and none of its knowledge."""
    blank, teacher, student = directory / "blank", directory / "teacher", directory / "student"
    vocab_size = make_char_tokenizer(blank, demo.LETTERS + ">")
    make_char_tokenizer(student, demo.LETTERS + ">")
    make_tiny_model(blank, vocab_size=vocab_size, hidden_size=64, context_tokens=64)
    make_tiny_model(student, vocab_size=vocab_size, hidden_size=32, context_tokens=64, seed=1)
    examples = demo.tasks(4096, seed=1)
    headrace.warm_start(model=blank, examples=examples, output=teacher, steps=250, learning_rate=3e-3)
    return teacher, student


@torch.no_grad()
def kl_to_teacher(student_dir: Path, teacher_dir: Path) -> float:
    """KL(student || teacher) per token on the student's own answers to 256 new words, exact at every position."""
    torch.manual_seed(0)
    student, teacher = (AutoModelForCausalLM.from_pretrained(d).eval() for d in (student_dir, teacher_dir))
    renderer = Renderer.from_directory(teacher_dir)
    words = [f"{row['prompt']}" for row in demo.tasks(256, seed=77)]
    token_ids = torch.tensor([renderer.encode(word).tolist() for word in words])
    alive = torch.ones(len(words), dtype=torch.bool)
    total, count = 0.0, 0
    for _ in range(ANSWER_TOKENS):
        own, other = (m(token_ids).logits[:, -1].log_softmax(-1) for m in (student, teacher))
        total += float((own.exp() * (own - other)).sum(-1)[alive].sum())
        count += int(alive.sum())
        drawn = torch.multinomial(own.exp(), 1)
        token_ids = torch.cat([token_ids, drawn], dim=1)
        alive &= ~torch.isin(drawn[:, 0], torch.tensor(renderer.stop_ids))
    return total / count


def main(divergence: str = "sampled") -> float:
    with tempfile.TemporaryDirectory() as made:
        teacher, student = make_models(Path(made))
        before, started = kl_to_teacher(student, teacher), time.perf_counter()
        result = headrace.train(
            model=student,
            tasks=demo.tasks(4096),
            reward=[],
            settings={
                "distill.teachers": {"speller": str(teacher)},
                "distill.divergence": divergence,
                "model.device": "cpu",
                "run.dir": str(Path(made) / "runs"),
                "run.steps": 120,
                "run.checkpoint_every": 0,
                "run.console": "off",
                "rollout.group_size": 4,
                "rollout.groups_per_step": 32,
                "rollout.max_tokens": ANSWER_TOKENS,
                "engine.max_running": 256,
                "trainer.learning_rate": 3e-3,
                "trainer.schedule": "linear",
                "trainer.betas": [0.9, 0.95],
            },
        )
        seconds = time.perf_counter() - started
        events = map(json.loads, (result.run_dir / "events.jsonl").read_text().splitlines())
        curve = [e["metrics"]["teacher_divergence"] for e in events if e["event"] == "step"]
        after = kl_to_teacher(result.model_dir, teacher)
    print(f"distill.divergence = {divergence}: what the trainer sees, by step")
    for step in (1, *range(30, len(curve) + 1, 30)):
        recent = curve[max(step - 10, 0) : step]
        mean = sum(recent) / len(recent)
        print(f"{step:5d}  {mean:8.4f}  {'#' * round(60 * mean / max(curve[:10]))}")
    print(f"KL to the teacher on new words: {before:.4f} -> {after:.4f} nats per token", end=" ")
    print(f"({1 - after / before:.1%} less) in {seconds:.0f} s of training")
    return 1 - after / before


if __name__ == "__main__":
    main(*sys.argv[1:])
